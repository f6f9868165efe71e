"""Emulated devices: the real engine over threads, with layers that sleep for their profiled time.

In:     a Profile (measured or estimated) and a Plan.
Out:    measured timelines of real sessions, one thread per device.

Values keep their names, readers and order; their size is scaled down by `BYTES_SCALE`, and the
links' bandwidth with it, so that gigabytes need not be moved. Backward sleeps run inside autograd.
Each device corrects its sleeps by what the last ones overslept, so that errors do not add up.
"""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dpipe.core.graph import ComponentGraph, ComponentKind, ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile, interpolate
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.runtime.bound import Binding, BoundFeedback, BoundLayer, BoundLoss
from lightning_dpipe.runtime.threads import Delay, ThreadHub
from lightning_dpipe.runtime.trace import StepTrace, merge
from lightning_dpipe.strategy.assemble import PipelineSession
from tests.ranks import run_threads

BYTES_SCALE = 4000
Jitter = Callable[[], float]
"""Factor on each sleep."""


class Sleeper(threading.local):
    """Sleeps on behalf of one device; `owed_s` is how much it overslept so far."""

    owed_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, less what earlier sleeps took too long."""
        start = time.perf_counter()
        if seconds > self.owed_s:
            time.sleep(seconds - self.owed_s)
        self.owed_s += time.perf_counter() - start - seconds


SLEEPER = Sleeper()


class _Sleep(torch.autograd.Function):
    """Identity of a token whose forward and backward take time."""

    @staticmethod
    def forward(ctx, token: Tensor, forward_s: float, backward_s: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.backward_s = backward_s
        SLEEPER.sleep(forward_s)
        return token.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        SLEEPER.sleep(ctx.backward_s)
        return grad, None, None


@dataclass(frozen=True)
class SleepLayer:
    """One layer: reads tensors, sleeps, writes tensors that depend on all of them."""

    samples: tuple[int, ...]
    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    weight: torch.nn.Parameter | None
    jitter: Jitter

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows = inputs[0].shape[0]
        forward = interpolate(self.samples, self.forward_us, rows) * 1e-6 * self.jitter()
        backward = interpolate(self.samples, self.backward_us, rows) * 1e-6 * self.jitter()
        token = torch.stack([x.flatten(1).mean(1) for x in inputs]).sum(0)
        if self.weight is not None:
            token = token * self.weight
        token = _Sleep.apply(token, forward, backward)
        return tuple(
            (token.view(rows, *(1,) * len(s)).expand(rows, *s)).contiguous() for s in self.shapes
        )


def scaled(graph: ModelGraph) -> ModelGraph:
    """The same graph with float32 values `BYTES_SCALE` times smaller."""
    values = tuple(
        replace(v, shape=(max(1, v.bytes_per_sample // BYTES_SCALE),), dtype="float32")
        for v in graph.values
    )
    return replace(graph, values=values)


def bind_sleeps(graph: ModelGraph, profile: Profile, jitter: Jitter) -> Binding:
    """Sleeping layers for a (scaled) graph, with one weight per trained layer."""
    layers = {c.name: _component(graph, c, profile, jitter) for c in graph.components}
    feedback = None
    if graph.feedback is not None:
        node = graph.feedback
        shape = graph.values[node.writes].shape

        def estimate(*inputs: Tensor) -> Tensor:
            return torch.zeros(inputs[0].shape[0], *shape)

        feedback = BoundFeedback(
            backbone=node.backbone, fn=estimate, reads=node.reads, writes=node.writes
        )
    losses = {
        node.backbone: BoundLoss(
            fn=lambda *x: torch.stack([t.flatten(1).mean(1) for t in x]).sum(0), reads=node.reads
        )
        for node in graph.losses
    }
    inputs = {graph.values[v].name: v for v in graph.inputs}
    return Binding(layers=layers, losses=losses, feedback=feedback, inputs=inputs, draw_key=None)


def _component(
    graph: ModelGraph, component: ComponentGraph, profile: Profile, jitter: Jitter
) -> tuple[BoundLayer, ...]:
    cost = profile.component(component.name)
    found = []
    for node, layer in zip(component.layers, cost.layers, strict=True):
        trained = component.kind is ComponentKind.BACKBONE and node.trained
        weight = torch.nn.Parameter(torch.ones(())) if trained else None
        found.append(
            BoundLayer(
                name=node.name,
                fn=SleepLayer(
                    samples=cost.samples, forward_us=layer.forward_us,
                    backward_us=layer.backward_us,
                    shapes=tuple(graph.values[v].shape for v in node.writes), weight=weight,
                    jitter=jitter,
                ),
                reads=node.reads,
                writes=tuple(enumerate(node.writes)),
                parameters=() if weight is None else (weight,),
                modules=(),
                random=False,
            )
        )  # fmt: skip
    return tuple(found)


def emulate(
    profile: Profile,
    plan: Plan,
    *,
    steps: int,
    jitter: float = 0.0,
    coins: Sequence[bool] = (),
    seed: int = 0,
) -> list[Timeline]:
    """Run `steps` steady iterations of one pipeline group; returns their measured timelines.

    Args:
        profile: Times and links of the emulated device.
        plan: Made from `profile`.
        steps: After one step that encodes up front.
        jitter: Sigma of a lognormal factor (mean 1) on every layer's time.
        coins: Self-conditioning of each step, if the model has it.
        seed: Of the jitter.
    """
    found = emulated_traces(profile, plan, steps=steps, jitter=jitter, coins=coins, seed=seed)
    return [merge(traces) for traces in found]


def period_us(profile: Profile, plan: Plan, *, steps: int) -> float:
    """Median time from the end of an iteration to the end of the next one.

    No barrier holds the devices between iterations: where they end at different times, the first
    to end begins the next iteration early, and a merged timeline is longer than the period.
    """
    found = emulated_traces(profile, plan, steps=steps)
    ends = [max(trace.end_ns for trace in traces) for traces in found]
    return statistics.median((b - a) / 1e3 for a, b in itertools.pairwise(ends))


def emulated_traces(
    profile: Profile,
    plan: Plan,
    *,
    steps: int,
    jitter: float = 0.0,
    coins: Sequence[bool] = (),
    seed: int = 0,
) -> list[list[StepTrace]]:
    """What each device recorded of each steady iteration; see `emulate`."""
    graph = scaled(profile.graph)
    plan = replace(plan, graph_digest=digest(graph), groups=plan.groups[:1])
    link = Delay(
        latency_s=profile.p2p.latency_us * 1e-6,
        bytes_per_s=profile.p2p.bytes_per_s / BYTES_SCALE,
    )
    hub = ThreadHub(plan.num_devices, delay=link, timeout_s=600.0)

    def body(rank: int, _: ThreadHub) -> list[StepTrace]:
        draw = random.Random(1000 * seed + rank)
        factor = (
            (lambda: draw.lognormvariate(-(jitter**2) / 2, jitter)) if jitter else (lambda: 1.0)
        )
        session = PipelineSession(
            graph=graph, binding=bind_sleeps(graph, profile, factor), plan=plan, rank=rank,
            transport=hub.transport(rank), device=torch.device("cpu"), seed=0, trace=True,
        )  # fmt: skip
        return _steps(session, graph, plan, steps, coins)

    traces = run_threads(body, plan.num_devices, hub=hub, timeout_s=600.0)
    return [[t[i] for t in traces] for i in range(1, steps + 1)]


def _steps(
    session: PipelineSession, graph: ModelGraph, plan: Plan, steps: int, coins: Sequence[bool]
) -> list[StepTrace]:
    sizes = (plan.batch_size,) * plan.num_devices
    batch = {
        graph.values[v].name: torch.zeros(plan.batch_size, *graph.values[v].shape)
        for v in graph.inputs
    }
    found = []
    for step in range(steps + 1):
        ahead = bool(plan.fills)
        result = session.step(
            batch, sizes=sizes, batch_index=step, loss_scale=1.0,
            next_batch=batch if ahead else None, next_sizes=sizes if ahead else None,
            self_conditioned=bool(coins and coins[step % len(coins)]), reduce=False,
        )  # fmt: skip
        assert result.trace is not None
        found.append(result.trace)
    return found

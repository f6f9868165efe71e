"""The parts of an emulated device: clock, layers, link, tracer and reducer.

Programs, order of ops, messages, fills and waits are the engine's own; only time is emulated. A
device has a clock of its own (`DeviceClock`): layers add their cost to what the device owes, and
one sleep at the end of an op pays for it, up to the moment the device would be through. So what
Python does inside an op is part of it, and what one sleep overslept is taken off the next. Messages
carry the time of the device that sent them, so a host that is late for one device does not delay
another. No clock is ever ahead of the host's at the end of an op, and the host's clock measures the
iteration: where the host cannot keep up, it takes longer than the devices say.

Spans are in device time, as CUDA events would give them. Values are a few numbers a sample; links
weigh a message by the bytes of the model's value, whose number is its width. Gradient sums over
replicas and optimizer steps take their profiled time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_dpipe.core.graph import ComponentGraph, ComponentKind, ModelGraph
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile, interpolate
from lightning_dpipe.core.program import Message
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.runtime.bound import Binding, BoundLayer, BoundLoss
from lightning_dpipe.runtime.threads import Delay, ThreadHandle, ThreadHub, ThreadTransport
from lightning_dpipe.runtime.trace import Mark, Tracer

CPU = torch.device("cpu")


class DeviceClock:
    """Time of one emulated device: `until_s` is when it is through with all it was given.

    `scale` stretches every cost, so that what the host needs becomes small beside it.
    """

    def __init__(
        self,
        *,
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scale = scale
        self.until_s = 0.0
        self._owed_s = 0.0
        self._clock, self._sleep = clock, sleep

    def start(self, at_s: float) -> None:
        """A step begins at `at_s`."""
        self.until_s, self._owed_s = at_s, 0.0

    def spend(self, microseconds: float) -> None:
        """Work that the op under way does."""
        self._owed_s += microseconds * 1e-6 * self.scale

    def settle(self, factor: float = 1.0) -> None:
        """End the op under way, `factor` times as long as its work: sleep until the device has."""
        self.until_s += self._owed_s * factor
        self._owed_s = 0.0
        left_s = self.until_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def resume(self, at_s: float) -> None:
        """What the device waited for was there at `at_s`."""
        self.until_s = max(self.until_s, at_s)


class _Spend(torch.autograd.Function):
    """Identity whose backward is work of a device."""

    @staticmethod
    def forward(ctx, token: Tensor, clock: DeviceClock, microseconds: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.clock, ctx.microseconds = clock, microseconds
        return token.view_as(token)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        ctx.clock.spend(ctx.microseconds)
        return grad, None, None


@dataclass(frozen=True)
class EmulatedLayer:
    """One layer: its outputs, ``[rows, width]``, depend on all its inputs and on its weight."""

    clock: DeviceClock
    samples: tuple[int, ...]
    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    widths: tuple[int, ...]
    weight: nn.Parameter | None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rows = inputs[0].shape[0]
        self.clock.spend(interpolate(self.samples, self.forward_us, rows))
        token = inputs[0][:, :1]
        for x in inputs[1:]:
            token = token + x[:, :1]
        if self.weight is not None:
            token = token * self.weight
        if token.requires_grad:
            backward_us = interpolate(self.samples, self.backward_us, rows)
            token = _Spend.apply(token, self.clock, backward_us)
        return tuple(token.expand(rows, width).contiguous() for width in self.widths)


def small(graph: ModelGraph) -> ModelGraph:
    """The same graph with values of few numbers: value i is float32 ``[i + 1]`` a sample."""
    values = (
        replace(value, shape=(i + 1,), dtype="float32") for i, value in enumerate(graph.values)
    )
    return replace(graph, values=tuple(values))


def emulated_link(profile: Profile, scale: float) -> Delay:
    """The profile's point-to-point link, `scale` times slower, for messages of `small` values."""
    sizes = [value.bytes_per_sample for value in profile.graph.values]

    def bytes_of(message: Message) -> int:
        rows, width = message.shape
        return rows * sizes[width - 1]

    return Delay(
        latency_s=profile.p2p.latency_us * 1e-6 * scale,
        bytes_per_s=profile.p2p.bytes_per_s / scale,
        bytes_of=bytes_of,
    )


def bind_emulated(graph: ModelGraph, profile: Profile, clock: DeviceClock) -> Binding:
    """Layers of a `small` graph that work on `clock`'s device, one weight per trained layer."""
    losses = {
        node.backbone: BoundLoss(
            fn=lambda *x: torch.stack([t[:, 0] for t in x]).sum(0), reads=node.reads
        )
        for node in graph.losses
    }
    return Binding(
        layers={c.name: _component(graph, c, profile, clock) for c in graph.components},
        losses=losses,
        feedback=None,
        inputs={graph.values[v].name: v for v in graph.inputs},
        draw_key=None,
    )


def _component(
    graph: ModelGraph, component: ComponentGraph, profile: Profile, clock: DeviceClock
) -> tuple[BoundLayer, ...]:
    cost = profile.component(component.name)
    found = []
    for node, layer in zip(component.layers, cost.layers, strict=True):
        trained = component.kind is ComponentKind.BACKBONE and node.trained
        weight = nn.Parameter(torch.ones(())) if trained else None
        fn = EmulatedLayer(
            clock=clock,
            samples=cost.samples,
            forward_us=layer.forward_us,
            backward_us=layer.backward_us,
            widths=tuple(graph.values[v].shape[0] for v in node.writes),
            weight=weight,
        )
        bound = BoundLayer(
            name=node.name,
            fn=fn,
            reads=node.reads,
            writes=tuple(enumerate(node.writes)),
            parameters=() if weight is None else (weight,),
            modules=(),
            random=False,
        )
        found.append(bound)
    return tuple(found)


class EmulatedTransport(ThreadTransport):
    """A thread transport whose messages cost the device what the profile's link says."""

    def __init__(self, hub: ThreadHub, rank: int, clock: DeviceClock, host_us: int) -> None:
        super().__init__(hub, rank)
        self._clock, self._host_us = clock, host_us

    def send(self, message: Message, tensor: Tensor) -> ThreadHandle:
        """Hand a message over, which keeps the device busy, and start sending it."""
        self._clock.resume(self._clock.until_s + self._host_us * 1e-6 * self._clock.scale)
        return super().send(message, tensor)

    def now_s(self) -> float:
        """The device's own time."""
        return self._clock.until_s

    def post(self, message: Message, buffer: Tensor) -> "_Arrival":  # type: ignore[override]
        """Start receiving; a wait ends when the message has arrived."""
        return _Arrival(super().post(message, buffer), self._clock)


@dataclass(slots=True)
class _Arrival:
    handle: ThreadHandle
    clock: DeviceClock

    def wait(self) -> None:
        self.handle.wait()
        self.clock.resume(self.handle.arrived_s)


class EmulatedTracer(Tracer):
    """Ends every op when the emulated device has done its work; `jitter` is a factor per op."""

    def __init__(self, rank: int, position: int, clock: DeviceClock) -> None:
        super().__init__(CPU, rank, position)
        self._clock = clock
        self.jitter: Callable[[], float] = lambda: 1.0

    def mark(self) -> Mark:
        """Now, on the device."""
        return round(self._clock.until_s * 1e9)

    def work(self, start: Mark, activity: Activity, label: str, op: Op | None = None) -> None:
        """Let the time of the op pass, then record it."""
        self._clock.settle(self.jitter())
        super().work(start, activity, label, op)


class Reductions:
    """Gradient sums over the replicas of each stage of one plan: they take time, and sum nothing.

    Other groups are taken to be as far as this one, as the simulator does.
    """

    def __init__(self, hub: ThreadHub, plan: Plan, profile: Profile, scale: float) -> None:
        self.hub, self.condition = hub, hub.condition()
        self.devices = [stage.devices for stage in plan.stages]
        self.length_s: list[float] = []
        for stage in plan.stages:
            num = len(plan.groups) * len(stage.devices)
            num_bytes = profile.trained_bytes(stage.backbone, stage.start, stage.stop)
            length_us = profile.allreduce.transfer_us(-(-2 * (num - 1) * num_bytes // num))
            self.length_s.append(length_us * 1e-6 * scale)
        self.started_s: dict[tuple[int, int], list[float]] = {}

    def start(self, step: int, stage: int, at_s: float) -> None:
        """One replica has its gradients."""
        with self.condition:
            self.started_s.setdefault((step, stage), []).append(at_s)
            self.condition.notify_all()

    def end_s(self, step: int, stage: int) -> float:
        """Wait until all replicas have started; when the sum is done."""
        started, num = self.started_s[step, stage], len(self.devices[stage])
        with self.condition:
            self.hub.wait_for(
                self.condition,
                lambda: len(started) == num,
                lambda: f"{len(started)} of {num} replicas started to sum stage {stage}",
            )
        return max(started) + self.length_s[stage]


@dataclass(slots=True)
class EmulatedReducer:
    """One device's part in `Reductions`, for its only stage."""

    reductions: Reductions
    stage: int
    clock: DeviceClock
    step: int = 0
    pending: bool = False

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Reducer`."""
        self.reductions.start(self.step, self.stage, self.clock.until_s)
        self.pending = True

    def wait(self) -> None:
        """See `Reducer`."""
        if self.pending:
            self.clock.resume(self.reductions.end_s(self.step, self.stage))
            self.clock.settle()
            self.pending = False
        self.step += 1

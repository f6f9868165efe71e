"""Fills made anew in mid-run: emulated devices whose frozen encoder gets slow.

    python -m benchmarks.replan [--quick] [--json]

Four emulated devices (`benchmarks.emulated_device`) train with filled bubbles and
a `Replanner` each. After `CHANGE` steps a frozen component takes `FACTOR` times as long. The fills
that were made for the old times go on until the next attempt, which measures, fills anew, measures
again and keeps what is faster.
"""

import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.common import Report, parser
from benchmarks.emulated_device import (
    CPU,
    DeviceClock,
    EmulatedLayer,
    EmulatedTracer,
    EmulatedTransport,
    bind_emulated,
    emulated_link,
    small,
)
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile, interpolate
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.strategy.assemble import PipelineSession
from lightning_dpipe.strategy.replan import Replanner
from tests.ranks import run_threads
from tests.synthetic import FrozenChain, model_profile
from tests.thread_link import Joint, ThreadLink

FACTOR = 3.0
SLOW = "text"
CHANGE = 10
"""The first step on which the component is slow."""


def model() -> Profile:
    """Eight layers, two frozen chains that fill the bubbles."""
    frozen = (
        FrozenChain(name=SLOW, forward_us=(1200, 1200, 1200)),
        FrozenChain(name="vae", forward_us=(900, 2700)),
    )
    return model_profile([1000] * 8, frozen=frozen)


@dataclass(frozen=True)
class ChangingLayer:
    """A layer that gets slow at step `CHANGE`; `step` holds the one under way."""

    layer: EmulatedLayer
    step: list[int]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.step[0] >= CHANGE:
            layer = self.layer
            usual_us = interpolate(layer.samples, layer.forward_us, inputs[0].shape[0])
            layer.clock.spend((FACTOR - 1) * usual_us)
        return self.layer(*inputs)


def changing(binding: Binding, step: list[int]) -> Binding:
    """The layers of `SLOW` follow the step count."""
    slow = []
    for layer in binding.layers[SLOW]:
        assert isinstance(layer.fn, EmulatedLayer)
        slow.append(replace(layer, fn=ChangingLayer(layer.fn, step)))
    return replace(binding, layers={**binding.layers, SLOW: tuple(slow)})


def train(profile: Profile, plan: Plan, steps: int, every: int) -> list[Mapping[str, float]]:
    """What each rank logged."""
    graph = small(profile.graph)
    plan = replace(plan, graph_digest=digest(graph))
    hub = ThreadHub(plan.num_devices, delay=emulated_link(profile, 1.0), timeout_s=600.0)
    joint = Joint(plan.num_devices)
    sizes = (plan.batch_size,) * plan.num_devices
    batch = {
        graph.values[v].name: torch.zeros(plan.batch_size, *graph.values[v].shape)
        for v in graph.inputs
    }
    started_s = [0.0]

    def now() -> None:
        started_s[0] = time.monotonic()

    together = threading.Barrier(plan.num_devices, action=now, timeout=600.0)

    def body(rank: int, _: ThreadHub) -> Mapping[str, float]:
        at, clock = [0], DeviceClock()
        session = PipelineSession(
            graph=graph, binding=changing(bind_emulated(graph, profile, clock), at), plan=plan,
            rank=rank, transport=EmulatedTransport(hub, rank, clock, profile.p2p.host_us),
            device=CPU, seed=0,
        )  # fmt: skip
        session.engine.tracer = EmulatedTracer(rank, plan.locate(rank)[1], clock)
        replanner = Replanner(
            every_n_steps=every, plan=plan, profile=profile, link=ThreadLink(rank, joint),
            adopt=lambda new, _: session.refill(new),
        )  # fmt: skip
        logged: dict[str, float] = {}
        for step in range(steps):
            at[0] = step
            wanted = replanner.wants(steady=session.encoded_ahead, self_conditioned=False)
            together.wait()
            clock.start(started_s[0])
            result = session.step(
                batch, sizes=sizes, batch_index=step, loss_scale=1.0, next_batch=batch,
                next_sizes=sizes, reduce=False,
            )  # fmt: skip
            if wanted:
                assert result.trace is not None
                logged |= replanner.traced(result.trace)
        return logged

    return run_threads(body, plan.num_devices, hub=hub, timeout_s=600.0)


def main() -> int:
    """Run and report."""
    options = parser(__doc__).parse_args()
    report = Report("replan")
    profile = model()
    plan = make_plan(profile, world_size=4, batch_size=4, num_stages=4, num_microbatches=4)
    ranks = train(profile, plan, steps=26 if options.quick else 46, every=15)
    report.rows = [{"rank": rank, **logged} for rank, logged in enumerate(ranks)]
    for name, value in ranks[0].items():
        report.figures[name.removeprefix("replan/")] = value
    figures = report.figures
    figures["after_over_before"] = figures["after_s"] / figures["before_s"]
    figures["gain_share"] = (1 - figures["after_over_before"]) / figures["predicted_gain"]
    report.bar("kept", "==", 1)
    report.bar("gain_share", ">=", 0.5)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

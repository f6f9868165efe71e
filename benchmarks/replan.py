"""Fills made anew in mid-run: emulated devices whose frozen encoder gets slow.

    python -m benchmarks.replan [--quick] [--json]

Four devices (threads, layers that sleep; see `benchmarks.emulation`) train with filled bubbles and
a `Replanner` each. After `CHANGE` steps a frozen component takes `FACTOR` times as long. The fills
that were made for the old times go on until the next attempt, which measures, fills anew, measures
again and keeps what is faster.
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import Report, parser
from benchmarks.emulation import SleepLayer, bind_sleeps, scaled
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
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


def bind_changing(profile: Profile, graph: Any, step: list[int]) -> Binding:
    """Sleeping layers; those of `SLOW` follow the step count."""
    binding = bind_sleeps(graph, profile, lambda: 1.0)

    def factor() -> float:
        return FACTOR if step[0] >= CHANGE else 1.0

    slow = []
    for layer in binding.layers[SLOW]:
        assert isinstance(layer.fn, SleepLayer)
        slow.append(replace(layer, fn=replace(layer.fn, jitter=factor)))
    return replace(binding, layers={**binding.layers, SLOW: tuple(slow)})


def train(profile: Profile, plan: Plan, steps: int, every: int) -> list[dict[str, float]]:
    """What each rank logged."""
    graph = scaled(profile.graph)
    plan = replace(plan, graph_digest=digest(graph))
    hub, joint = ThreadHub(plan.num_devices, timeout_s=600.0), Joint(plan.num_devices)
    sizes = (plan.batch_size,) * plan.num_devices
    batch = {
        graph.values[v].name: torch.zeros(plan.batch_size, *graph.values[v].shape)
        for v in graph.inputs
    }

    def body(rank: int, _: ThreadHub) -> dict[str, float]:
        at = [0]
        session = PipelineSession(
            graph=graph, binding=bind_changing(profile, graph, at), plan=plan, rank=rank,
            transport=hub.transport(rank), device=torch.device("cpu"), seed=0,
        )  # fmt: skip
        replanner = Replanner(
            every_n_steps=every, plan=plan, profile=profile, link=ThreadLink(rank, joint),
            adopt=lambda new, _: session.refill(new),
        )  # fmt: skip
        logged: dict[str, float] = {}
        for step in range(steps):
            at[0] = step
            wanted = replanner.wants(steady=session.encoded_ahead, self_conditioned=False)
            session.trace(wanted)
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

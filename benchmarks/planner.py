"""The planner on paper: what it finds, against DiffusionPipe's own, a lower bound and DDP.

    python -m benchmarks.planner [--quick] [--json]

(a) 24 bubble shares and bubble / frozen ratios of unfilled 1F1B that DiffusionPipe reports, from
    balanced synthetic profiles of its two models.
(b) SD 2.1 and ControlNet at 512 px on 8 to 64 A100 (estimated profiles, conf/profiles), four local
    batches, with and without self-conditioning: predicted iteration of our plan, of the paper's
    planner (with and without data parallelism to fall back on), GPipe with 2 stages and 4
    micro-batches, and DDP. The useful ratio is the least full-batch work / (devices x iteration).
    Where data parallelism is the best plan it hides how well pipelines are planned, so our best one
    of 2 to 4 stages is compared with the paper's too.
(c) Processor seconds of planning, 8 to 1024 devices.
(d) Printed only: bytes per network card by placement, see `benchmarks.mapping`.
"""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.common import OUT, Report, parser, print_table, show
from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.graph import FeedbackNode, Value
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile, reduce_us
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.planning.auto import Found, Space, search
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.network import network_of
from lightning_dpipe.planning.paper import paper_plan
from lightning_dpipe.planning.search import make_plan, schedule_of
from lightning_dpipe.planning.variants import SELF_CONDITIONING, expected_us, variants_of
from lightning_dpipe.simulation.memory import peak_bytes
from lightning_dpipe.simulation.simulate import simulate
from tests.synthetic import FrozenChain, model_profile

CONF = Path(__file__).resolve().parents[1] / "conf"
MODELS = ("sd21", "controlnet")
USEFUL = 0.97
PIPELINES = (2, 3, 4)
"""Numbers of stages of our plan when it has to be a pipeline, as the paper's planner makes."""

BATCHES = (8, 16, 32, 48)
"""Samples per device: 64, 128, 256 and 384 on 8 devices, as in the paper."""

RHO = {"sd21": 3 / 6.843, "controlnet": 3 / 3.354}
"""Frozen / trained time at batch 64, from the figure's first row: bubble / frozen is
(S-1) / (M rho)."""

FIGURE_4 = {  # (stages, micro-batches): % bubbles and bubble / frozen, SD 2.1 then ControlNet
    (4, 1): (67.6, 684.3, 61.3, 335.4), (4, 2): (51.0, 342.2, 44.2, 167.7),
    (4, 3): (41.0, 228.1, 34.5, 111.8), (4, 4): (34.3, 171.1, 28.4, 83.9),
    (3, 1): (58.2, 456.2, 51.4, 223.6), (3, 2): (41.0, 228.1, 34.5, 111.8),
    (3, 3): (31.7, 152.1, 26.0, 74.5), (3, 4): (25.8, 114.1, 20.9, 55.9),
    (2, 1): (41.0, 228.1, 34.5, 111.8), (2, 2): (25.8, 114.1, 20.9, 55.9),
    (2, 3): (18.8, 76.0, 15.0, 37.3), (2, 4): (14.8, 57.0, 11.7, 28.0),
}  # fmt: skip


def figure_4() -> Iterator[dict[str, Any]]:
    """Each cell of the figure, simulated."""
    for (stages, microbatches), reported in FIGURE_4.items():
        for i, model in enumerate(MODELS):
            trained_us = 12 * 3 * 10_000
            chain = FrozenChain(name="frozen", forward_us=(round(RHO[model] * trained_us),))
            profile = model_profile([10_000] * 12, frozen=(chain,), width=0)
            plan = make_plan(
                profile,
                world_size=stages,
                batch_size=12,
                num_microbatches=microbatches,
                fill=False,
            )
            timeline = simulate(plan, schedule_of(plan), profile)
            share = 100 * timeline.bubble_ratio
            ratio = 100 * timeline.bubble_us / timeline.total_us(Activity.FROZEN)
            yield {
                "model": model,
                "stages": stages,
                "microbatches": microbatches,
                "share": share,
                "share_paper": reported[2 * i],
                "over_frozen": ratio,
                "over_frozen_paper": reported[2 * i + 1],
                "points": max(abs(share - reported[2 * i]), abs(ratio - reported[2 * i + 1])),
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction problem; `cluster` has as many nodes as `world` needs."""

    model: str
    profile: Profile
    cluster: Cluster
    world: int
    batch_size: int

    def seen(self, plan: Plan) -> Profile:
        """The profile with the links that the plan's pipelines see."""
        return network_of(self.cluster).placed(self.profile, plan)


def cells(profiles: dict[str, Profile], quick: bool) -> Iterator[Cell]:
    """GPUs x batches x models x self-conditioning."""
    for model, plain in profiles.items():
        for profile in (plain, with_feedback(plain)):
            for world in (8, 64) if quick else (8, 16, 32, 64):
                for batch_size in (8, 32) if quick else BATCHES:
                    yield Cell(
                        model=model,
                        profile=profile,
                        cluster=cluster_of(world),
                        world=world,
                        batch_size=batch_size,
                    )


def cluster_of(world: int) -> Cluster:
    """Nodes of 8 A100."""
    file = OmegaConf.to_container(OmegaConf.load(CONF / "cluster" / "p4de_8x8.yaml"))
    cluster = Cluster.from_mapping(file)  # type: ignore[arg-type]
    return replace(cluster, nodes=math.ceil(world / cluster.devices_per_node))


def with_feedback(profile: Profile) -> Profile:
    """The same model with self-conditioning: its first layer also reads an estimate."""
    graph = profile.graph
    (backbone,) = graph.backbones
    output = backbone.layers[-1].writes[-1]
    estimate = replace(graph.values[output], name="estimate", requires_grad=False)
    values: tuple[Value, ...] = (*graph.values, estimate)
    first, *others = backbone.layers
    reading = replace(first, reads=(*first.reads, len(values) - 1))
    changed = replace(backbone, layers=(reading, *others))
    return replace(
        profile,
        graph=replace(
            graph,
            values=values,
            components=tuple(changed if c is backbone else c for c in graph.components),
            feedback=FeedbackNode(backbone=backbone.name, reads=(output,), writes=len(values) - 1),
        ),
    )


def conditioned_share(profile: Profile) -> float:
    """Share of steps with the extra forward."""
    return sum(s for conditioned, s in variants_of(profile.graph, SELF_CONDITIONING) if conditioned)


def least_work_us(profile: Profile, batch_size: int) -> float:
    """Least time of a device's share of the batch: each layer at the size with the best rate."""
    cost = profile.component(profile.graph.backbones[0].name)
    frozen_us = FrozenCosts.of(profile, samples=batch_size).least_us
    forward = 1 + conditioned_share(profile)
    trained_us = sum(
        min(
            (
                forward * profile.forward_us(cost.name, i, i + 1, n)
                + profile.backward_us(cost.name, i, i + 1, n)
            )
            * batch_size
            / n
            for n in range(1, batch_size + 1)
        )
        for i in range(len(cost.layers))
    )
    return frozen_us + trained_us


def ddp_us(cell: Cell) -> float:
    """DDP: encodes first, accumulates what memory asks for, reduces under the last backward."""
    profile = cell.profile
    name = profile.graph.backbones[0].name
    layers = (name, 0, len(profile.component(name).layers))
    frozen_us = sum(
        profile.forward_us(c.name, 0, len(c.layers), cell.batch_size) for c in profile.graph.frozen
    )
    for microbatches in range(1, cell.batch_size + 1):
        plan = make_plan(
            profile,
            world_size=cell.world,
            num_stages=1,
            num_microbatches=microbatches,
            batch_size=cell.batch_size,
            fill=False,
        )
        if max(peak_bytes(plan, schedule_of(plan), profile)) <= (profile.memory_bytes or math.inf):
            break
    sizes = split_sizes(cell.batch_size, microbatches)
    forward_us = sum(profile.forward_us(*layers, n) for n in sizes)
    backward_us = sum(profile.backward_us(*layers, n) for n in sizes)
    reduced_us = reduce_us(profile.trained_bytes(*layers), cell.seen(plan).legs(cell.world, 0))
    exposed_us = reduced_us - profile.backward_us(*layers, sizes[-1])
    return (
        frozen_us
        + (1 + conditioned_share(profile)) * forward_us
        + backward_us
        + max(0, exposed_us)
        + profile.optimizer_us(*layers)
        + profile.overhead_us
    )


def gpipe_us(cell: Cell) -> float:
    """GPipe with 2 stages and 4 micro-batches, frozen work first, memory not limited."""
    plan = make_plan(
        cell.profile,
        world_size=cell.world,
        batch_size=cell.batch_size,
        num_stages=2,
        num_microbatches=4,
        schedule="gpipe",
        fill=False,
    )
    return expected_us(plan, cell.seen(plan))


def row_of(cell: Cell) -> dict[str, Any]:
    """Plan one cell with every planner."""
    network = network_of(cell.cluster)
    options: dict[str, Any] = {"world_size": cell.world, "batch_size": cell.batch_size}
    # As long as it takes: a search that stops early leaves a bound that allows too much.
    ours = search(cell.profile, space=Space(network=network, max_idle=None), **options)
    paper = paper_plan(cell.profile, network=network, **options)
    either = paper_plan(cell.profile, network=network, least_stages=1, **options)
    pipelines = [
        search(cell.profile, space=Space(num_stages=s, network=network), **options)
        for s in PIPELINES
    ]
    pipeline = min(pipelines, key=lambda found: found.expected_us)
    work_us = least_work_us(cell.profile, cell.batch_size)
    timeline = simulate(ours.plan, schedule_of(ours.plan), cell.seen(ours.plan))
    return {
        "model": cell.model,
        "devices": cell.world,
        "batch": cell.world * cell.batch_size,
        "selfcond": cell.profile.graph.feedback is not None,
        "plan": shape_of(ours.plan),
        "ms": ours.expected_us / 1e3,
        "bound_ms": ours.bound_us / 1e3,
        "useful": work_us / ours.expected_us,
        "useful_bound": work_us / ours.bound_us,
        "bubble": timeline.bubble_ratio,
        "paper_plan": shape_of(paper.plan),
        "over_paper": paper.expected_us / ours.expected_us,
        "over_paper_or_dp": either.expected_us / ours.expected_us,
        "pipeline": shape_of(pipeline.plan),
        "pipeline_over_paper": paper.expected_us / pipeline.expected_us,
        "pipeline_gap": max(x.expected_us / x.bound_us for x in pipelines) - 1,
        "over_gpipe": gpipe_us(cell) / ours.expected_us,
        "over_ddp": ddp_us(cell) / ours.expected_us,
    }


def shape_of(plan: Plan) -> str:
    """Replicas of each stage, micro-batches, pipelines: ``1+2 M4 x8``; buckets if all on one."""
    if plan.num_devices == 1 and len(plan.stages) > 1:
        return f"{len(plan.stages)} buckets M{plan.num_microbatches} x{len(plan.groups)}"
    replicas = "+".join(str(len(stage.devices)) for stage in plan.stages)
    return f"{replicas} M{plan.num_microbatches} x{len(plan.groups)}"


def timed(profile: Profile, world: int) -> tuple[float, Found]:
    """Processor seconds of one search."""
    start = time.process_time()
    space = Space(network=network_of(cluster_of(world)))
    found = search(profile, world_size=world, batch_size=32, space=space)
    return time.process_time() - start, found


def plot(rows: list[dict[str, Any]]) -> Path:
    """Predicted speed-ups, one panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = sorted({row["model"] for row in rows})
    figure, axes = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model and not row["selfcond"]]
        labels = [f"{row['devices']}: {row['batch']}" for row in mine]
        for name in ("over_paper", "over_gpipe", "over_ddp"):
            axis.plot(labels, [row[name] for row in mine], marker="o", label=name)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=f"{model} on A100 (estimated)", xlabel="devices: batch", ylabel="speed-up")
        axis.tick_params(axis="x", rotation=60)
        axis.legend()
    OUT.mkdir(exist_ok=True)
    path = OUT / "planner.png"
    figure.tight_layout()
    figure.savefig(path)
    return path


def main() -> int:
    """Run all three parts and report."""
    options = parser(__doc__).parse_args()
    report = Report("planner")
    figure = list(figure_4())
    report.figures["fig4_max_points"] = max(row["points"] for row in figure)
    profiles = {m: load(Profile, CONF / "profiles" / f"{m}_a100_bf16.json") for m in MODELS}
    rows = []
    for cell in cells(profiles, options.quick):
        rows.append(row_of(cell))
        show(f"{cell.model} {cell.world} devices, {rows[-1]['batch']}: {rows[-1]['plan']}")
    worse = [r for r in rows if min(r["over_paper"], r["over_paper_or_dp"]) < 1 - 1e-9]
    worse_pipelines = [r for r in rows if r["pipeline_over_paper"] < 1 - 1e-9]
    allowed = [r["useful"] for r in rows if r["useful_bound"] >= USEFUL]
    report.figures |= {
        "cells": len(rows),
        "cells_worse_than_paper_planner": len(worse),
        "cells_worse_as_pipelines": len(worse_pipelines),
        "pipeline_over_paper_max": max(r["pipeline_over_paper"] for r in rows),
        "pipeline_gap_max": max(r["pipeline_gap"] for r in rows),
        "cells_that_allow_useful": len(allowed),
        "min_useful_ratio": min(allowed, default=1.0),
        "gap_to_bound_max": max(r["ms"] / r["bound_ms"] for r in rows) - 1,
        "over_paper_max": max(r["over_paper"] for r in rows),
        "over_gpipe_max": max(r["over_gpipe"] for r in rows),
        "over_ddp_max": max(r["over_ddp"] for r in rows),
    }
    for world in (8, 16, 32, 64, 256, 1024):
        seconds = max(timed(profile, world)[0] for profile in profiles.values())
        report.figures[f"seconds_{world}"] = seconds
    report.rows = rows
    if not options.json:
        from benchmarks.mapping import all_rows  # which takes its cells from here

        print_table(figure)
        print("\nBytes per network card and step, by where the stages of a pipeline are:\n")
        print_table(list(all_rows(quick=options.quick)))
        print(f"\nPredictions from estimated profiles; plot: {plot(rows)}\n")
    report.bar("fig4_max_points", "<=", 0.2)
    report.bar("cells_worse_than_paper_planner", "==", 0)
    report.bar("cells_worse_as_pipelines", "==", 0)
    report.bar("min_useful_ratio", ">=", USEFUL)
    report.bar("seconds_64", "<=", 3.0)
    report.bar("seconds_1024", "<=", 30.0)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Data parallelism in several stages on one device, whose reductions start one after the other.

In:     costs of all stages, how a device cuts its batch.
Out:    chains of stages on device 0, and what no such chain beats.

With one stage the reduction starts when the whole backward has ended. With several, each stage's
starts when its own last backward has, as DDP does with buckets; and a stage that recomputes keeps
its input only, which is activation checkpointing.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.planning.directions import Directions, backbones_of
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.simulation.memory import peak_bytes

COUNTS = (2, 4, 8, 16)
"""Numbers of stages: each one costs a launch of its own reduction."""


def least_us(
    costs: BackboneCosts | Directions, cutting: Cutting, *, frozen_us: int, hidden: bool
) -> float:
    """Least iteration of any number of stages on one device, without the profile's overhead.

    All ops, frozen work and the optimizer run one after the other. No reduction starts before the
    last micro-batch's first backward, and a device's reductions do not overlap. Of several
    backbones each micro-batch of the first goes forward and back before that of the next.
    """
    tables = [
        c.table(of(cutting), replicas=1, from_back=1, limited=False)
        for c, of in backbones_of(costs)
    ]
    work = sum(float(t.work[0, -1]) for t in tables)
    step = sum(float(t.step[0, -1]) for t in tables)
    sync = sum(float(t.sync[0, -1]) for t in tables)
    rows = cutting.sizes[-1]
    last = sum(float(t.last[0, -1]) for t in tables) + sum(
        float(c.at("forward_us", rows)[0, -1]) for c, _ in backbones_of(costs)[1:]
    )
    reduced_us = work - last + sync + step
    load_us = work + step + (frozen_us if hidden else 0)
    return max(load_us, reduced_us) + (0 if hidden else frozen_us)


def bucket_stages(costs: BackboneCosts | Directions) -> Iterator[tuple[Stage, ...]]:
    """Stages of about equal gradient bytes, few first; recomputing ones last."""
    backbones = [c for c, _ in backbones_of(costs)]
    for recompute in (False, True):
        for count in COUNTS:
            stages = tuple(s for c in backbones for s in _equal_bytes(c, count, recompute))
            if len(stages) > len(backbones):
                yield stages


def _equal_bytes(costs: BackboneCosts, count: int, recompute: bool) -> Iterator[Stage]:
    """A backbone in up to `count` stages on device 0."""
    sums = costs.trained_bytes[0]
    wanted = sums[-1] * np.arange(1, count) / count
    cuts = sorted({int(np.searchsorted(sums, num_bytes)) for num_bytes in wanted})
    borders = (0, *(c for c in cuts if 0 < c < costs.num_layers), costs.num_layers)
    for start, stop in pairwise(borders):
        yield Stage(
            backbone=costs.backbone, start=start, stop=stop, devices=(0,), recompute=recompute
        )


def fits(costs: BackboneCosts | Directions, cutting: Cutting, stages: tuple[Stage, ...]) -> bool:
    """Whether the device's memory holds the stages."""
    if cutting.memory_bytes is None:
        return True
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=((0,),),
        stages=stages,
        num_microbatches=cutting.num_microbatches,
        batch_size=sum(cutting.sizes),
        schedule=cutting.schedule,
    )
    return max(peak_bytes(plan, schedule_of(plan), costs.profile)) <= cutting.memory_bytes

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
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.simulation.memory import peak_bytes

COUNTS = (2, 4, 8, 16)
"""Numbers of stages: each one costs a launch of its own reduction."""


def least_us(costs: BackboneCosts, cutting: Cutting, *, frozen_us: int, hidden: bool) -> float:
    """Least iteration of any number of stages on one device, without the profile's overhead.

    All ops, frozen work and the optimizer run one after the other. No reduction starts before the
    last micro-batch's first backward, and a device's reductions do not overlap.
    """
    table = costs.table(cutting, replicas=1, from_back=1, limited=False)
    work, step = float(table.work[0, -1]), float(table.step[0, -1])
    reduced_us = work - float(table.last[0, -1]) + float(table.sync[0, -1]) + step
    load_us = work + step + (frozen_us if hidden else 0)
    return max(load_us, reduced_us) + (0 if hidden else frozen_us)


def bucket_stages(costs: BackboneCosts) -> Iterator[tuple[Stage, ...]]:
    """Stages of about equal gradient bytes, few first; recomputing ones last."""
    sums = costs.trained_bytes[0]
    for recompute in (False, True):
        for count in COUNTS:
            wanted = sums[-1] * np.arange(1, count) / count
            cuts = sorted({int(np.searchsorted(sums, bytes_)) for bytes_ in wanted})
            borders = (0, *(c for c in cuts if 0 < c < costs.num_layers), costs.num_layers)
            if len(borders) > 2:
                yield tuple(
                    Stage(
                        backbone=costs.backbone,
                        start=start,
                        stop=stop,
                        devices=(0,),
                        recompute=recompute,
                    )
                    for start, stop in pairwise(borders)
                )


def fits(costs: BackboneCosts, cutting: Cutting, stages: tuple[Stage, ...]) -> bool:
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

"""Every channel that any program of a plan can use, in one order on all ranks.

Process groups are created collectively and before the first step, so the list may not depend on a
rank, a batch shape or a variant.
"""

from itertools import product

from lightning_dpipe.core.crossings import crossings, stage_reads
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.program import Channel, Lane


def plan_channels(plan: Plan, graph: ModelGraph) -> tuple[Channel, ...]:
    """Directed edges of all groups, sorted."""
    edges: set[tuple[int, int, Lane]] = set()

    def join(source: int, target: int) -> None:
        homes = (plan.stages[source].devices, plan.stages[target].devices)
        edges.update((a, b, Lane.PIPELINE) for a, b in product(*homes))

    for crossing in crossings(graph, plan.stages):
        for reader in crossing.readers:
            join(crossing.writer, reader)
        if graph.values[crossing.value].requires_grad:
            for source, target in crossing.gradient_hops:
                join(source, target)
    sides = set(graph.side_inputs)
    for index in range(len(plan.stages)):
        reads = stage_reads(graph, plan.stages, index)
        if graph.feedback is not None and graph.feedback.writes in reads:
            for other in range(len(plan.stages)):
                if plan.stages[other].backbone == graph.feedback.backbone:
                    join(other, index)
        if sides.intersection(reads):
            every = range(plan.num_devices)
            edges.update((a, b, Lane.ROWS) for a, b in product(every, plan.stages[index].devices))
    if sides or graph.frozen_fields:
        edges.update((f.home, f.device, Lane.ROWS) for f in plan.fills)
    found = [
        Channel(source=group[source], target=group[target], lane=lane)
        for group in plan.groups
        for source, target, lane in edges
        if source != target
    ]
    return tuple(sorted(found, key=lambda c: (c.source, c.target, c.lane.value)))

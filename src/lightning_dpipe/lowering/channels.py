"""Every channel that any program of a plan can use, in one order on all ranks.

Process groups are created collectively and before the first step, so the list may not depend on a
rank, a batch shape or a variant.
"""

from lightning_dpipe.core.crossings import crossings, stage_reads
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.program import Channel, Lane


def plan_channels(plan: Plan, graph: ModelGraph) -> tuple[Channel, ...]:
    """Directed edges of all groups, sorted."""
    edges: set[tuple[int, int, Lane]] = set()
    home = [stage.devices[0] for stage in plan.stages]
    for crossing in crossings(graph, plan.stages):
        for reader in crossing.readers:
            edges.add((home[crossing.writer], home[reader], Lane.PIPELINE))
        if graph.values[crossing.value].requires_grad:
            for source, target in crossing.gradient_hops:
                edges.add((home[source], home[target], Lane.PIPELINE))
    sides = set(graph.side_inputs)
    for index in range(len(plan.stages)):
        reads = stage_reads(graph, plan.stages, index)
        if graph.feedback is not None and graph.feedback.writes in reads:
            for other in range(len(plan.stages)):
                if plan.stages[other].backbone == graph.feedback.backbone:
                    edges.add((home[other], home[index], Lane.PIPELINE))
        if sides.intersection(reads):
            for device in range(plan.num_devices):
                edges.add((device, home[index], Lane.ROWS))
    found = [
        Channel(source=group[source], target=group[target], lane=lane)
        for group in plan.groups
        for source, target, lane in edges
        if source != target
    ]
    return tuple(sorted(found, key=lambda c: (c.source, c.target, c.lane.value)))

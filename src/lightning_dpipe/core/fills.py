"""Which fills of a plan run in a given step, and after how many of the device's ops.

One rule for the simulator and for lowering, so that what is predicted is what runs. A plan's fills
are for its own batch size and micro-batches: for a shorter next batch rows are cut; a fill whose op
this schedule does not have runs with the one before it; rows beyond the plan's batch run last.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.program import StepShape


def fill_slots(
    plan: Plan, graph: ModelGraph, orders: Sequence[Sequence[Op]], shape: StepShape
) -> Mapping[tuple[int, int], Sequence[Fill]]:
    """The step's fills by (device, number of ops that the device has done before them).

    Args:
        plan: Holds the fills, each device's in run order.
        graph: Names the frozen components.
        orders: The ops that each device runs in this step.
        shape: Sizes of the batch to encode ahead; None there: nothing is filled.
    """
    slots: dict[tuple[int, int], list[Fill]] = defaultdict(list)
    if shape.next_sizes is None:
        return slots
    index = [{op: i + 1 for i, op in enumerate(order)} for order in orders]
    at = [0] * plan.num_devices
    covered = [0] * plan.num_devices
    for fill in plan.fills:
        if fill.self_conditioned != shape.self_conditioned:
            continue
        d, last = fill.device, min(fill.last, shape.next_sizes[fill.device])
        covered[d] = max(covered[d], fill.last)
        if fill.after is not None:
            at[d] = max(at[d], index[d].get(fill.after, at[d]))
        if fill.first < last:
            slots[d, at[d]].append(replace(fill, last=last))
    for d, size in enumerate(shape.next_sizes):
        if size > covered[d]:
            slots[d, len(orders[d])] += _whole(graph, d, covered[d], size)
    return slots


def _whole(graph: ModelGraph, device: int, first: int, last: int) -> list[Fill]:
    """All frozen work of some rows, after the last op."""
    return [
        Fill(
            device=device,
            after=None,
            component=component.name,
            start=0,
            stop=len(component.layers),
            first=first,
            last=last,
        )
        for component in graph.frozen
    ]

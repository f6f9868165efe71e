"""Which fills of a plan run in a given step, after how many of the device's ops, and who encodes.

One rule for the simulator and for lowering, so that what is predicted is what runs. A plan's fills
are for its own batch size and micro-batches: for a shorter next batch rows are cut; a fill whose op
this schedule does not have runs with the one before it; rows beyond the plan's batch run last, on
the device that loaded them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.program import StepShape

MIN_CHUNK_BYTES = 256 * 1024
"""Row messages smaller than this are joined over micro-batches: a message costs ~50 us of host."""

FillSlots = Mapping[tuple[int, int], Sequence[Fill]]
"""A step's fills by (device, number of ops that the device has done before them)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Samples ``[first, last)`` of device `owner`'s local batch are encoded by `device`."""

    owner: int
    device: int
    first: int
    last: int


def fill_slots(
    plan: Plan, graph: ModelGraph, orders: Sequence[Sequence[Op]], shape: StepShape
) -> FillSlots:
    """The step's fills.

    Args:
        plan: Holds the fills, each device's in run order.
        graph: Names the frozen components.
        orders: The ops that each device runs in this step.
        shape: Sizes of the batch to encode ahead; None there: nothing is filled.

    Raises:
        PlanError: A fill names an owner that the group does not have.
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
        d, home = fill.device, fill.home
        if not 0 <= home < plan.num_devices:
            raise PlanError(
                f"a fill of device {d} encodes samples of device {home}; the group has devices "
                f"0..{plan.num_devices - 1}: plan again"
            )
        last = min(fill.last, shape.next_sizes[home])
        covered[home] = max(covered[home], fill.last)
        if fill.after is not None:
            at[d] = max(at[d], index[d].get(fill.after, at[d]))
        if fill.first < last:
            slots[d, at[d]].append(replace(fill, last=last))
    for d, size in enumerate(shape.next_sizes):
        if size > covered[d]:
            slots[d, len(orders[d])] += _whole(graph, d, covered[d], size)
    return slots


def encoders(fills: Iterable[Fill], sizes: Sequence[int]) -> tuple[Run, ...]:
    """Who encodes which samples, by owner and first sample; without a fill the owner does.

    Args:
        fills: Fills of one step.
        sizes: Local batch size of each device.

    Raises:
        PlanError: Two devices encode the same sample.
    """
    who: list[list[int | None]] = [[None] * size for size in sizes]
    for fill in fills:
        rows = who[fill.home]
        taken = set(rows[fill.first : fill.last]) - {None, fill.device}
        if taken:
            raise PlanError(
                f"devices {min(d for d in taken if d is not None)} and {fill.device} both encode "
                f"samples {fill.first}:{fill.last} of device {fill.home}; give every sample one "
                "device for all its frozen layers"
            )
        rows[fill.first : fill.last] = [fill.device] * (fill.last - fill.first)
    found = []
    for owner, rows in enumerate(who):
        first = 0
        for device, same in groupby(owner if d is None else d for d in rows):
            last = first + len(list(same))
            found.append(Run(owner, device, first, last))
            first = last
    return tuple(found)


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

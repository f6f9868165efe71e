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


def check_fills(plan: Plan, graph: ModelGraph) -> None:
    """Refuse fills that do not encode every sample they touch, once and in a possible order.

    Raises:
        PlanError: A fill is of what is not there, or a layer is left out, repeated or too early.
    """
    for fill in plan.fills:
        layers = {c.name: len(c.layers) for c in graph.frozen}.get(fill.component)
        if layers is None or fill.stop > layers:
            known = ", ".join(f"{c.name} 0:{len(c.layers)}" for c in graph.frozen) or "none"
            raise PlanError(
                f"a fill of device {fill.device} is of layers {fill.start}:{fill.stop} of "
                f"{fill.component!r}; the frozen components are {known}: plan again"
            )
        if fill.after is not None and not _is_op_of(plan, fill.after, fill.device):
            raise PlanError(
                f"a fill of device {fill.device} comes after {fill.after}, which is no op of that "
                f"device; the plan has {len(plan.stages)} stages and {plan.num_microbatches} "
                "micro-batches: plan again"
            )
    for variant in (False, True):
        fills = [fill for fill in plan.fills if fill.self_conditioned is variant]
        for home in range(plan.num_devices):
            _check_rows([fill for fill in fills if fill.home == home], home, graph)


def _is_op_of(plan: Plan, op: Op, device: int) -> bool:
    return (
        0 <= op.stage < len(plan.stages)
        and 0 <= op.microbatch < plan.num_microbatches
        and device in plan.stages[op.stage].devices
    )


def _check_rows(fills: Sequence[Fill], home: int, graph: ModelGraph) -> None:
    """Walk the fills of one device's samples; `done` counts a component's layers by sample."""
    frozen = {c.name: c for c in graph.frozen}
    num_rows = max((fill.last for fill in fills), default=0)
    done = [dict.fromkeys(frozen, 0) for _ in range(num_rows)]
    for fill in fills:
        needs = {
            graph.writers[value]
            for layer in frozen[fill.component].layers[fill.start : fill.stop]
            for value in layer.reads
            if value in graph.writers and graph.writers[value][0] != fill.component
        }
        for row in range(fill.first, fill.last):
            late = [name for name, layer in needs if done[row][name] <= layer]
            if done[row][fill.component] != fill.start or late:
                raise PlanError(
                    f"a fill runs layers {fill.start}:{fill.stop} of {fill.component!r} on sample "
                    f"{row} of device {home} when {done[row][fill.component]} of them are done"
                    + "".join(f" and {name!r} has not written what they read" for name in late[:1])
                    + "; every layer runs once, in order: plan again"
                )
            done[row][fill.component] = fill.stop
    for row, counts in enumerate(done):
        for name, count in counts.items():
            if count < len(frozen[name].layers):
                raise PlanError(
                    f"the fills run {count} of {len(frozen[name].layers)} layers of {name!r} on "
                    f"sample {row} of device {home}; they must run all, or nothing: plan again"
                )


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

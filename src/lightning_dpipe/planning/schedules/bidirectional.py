"""Several backbones on the same devices, their pipelines in opposite directions.

In:     chains of stages with the devices and relative op lengths of each, a schedule's name.
Out:    one order of ops per device. Each chain keeps the named schedule's own order on every stage;
        which chain goes next on a device is decided by an event simulation.
Source: DiffusionPipe (arXiv 2405.01248), section 4.3; two directions as in Chimera (2107.06925).
        Ours differs: any number of chains of any lengths, so the order is found, not tabulated.

Where one chain waits for its first inputs or gradients the other one, coming from the other side,
works. The order is a linear extension of all chains' dependencies, so it cannot deadlock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules import build_schedule

UNIT = (1, 2)
"""Lengths of a forward and a backward when nothing better is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One backbone: its stages' numbers, devices and lengths of (forward, backward)."""

    stages: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, int], ...] = ()
    self_conditioned: bool = False


def bidirectional(
    name: str, chains: Sequence[Chain], *, num_devices: int, num_microbatches: int
) -> Schedule:
    """Interleave chains on shared devices: event-list scheduling, one op after the other.

    Of the ops that come next on their stages and whose inputs exist, the one that can start
    earliest is placed. Ties are broken once for a backward before a forward (it frees activations),
    then the lowest micro-batch, and once for the longest way to the end of its chain; the shorter
    of the two results is taken.

    Args:
        name: A key of `SCHEDULES`: each stage's own order.
        chains: The backbones; a device may be in any of them.
        num_devices: Devices of one pipeline.
        num_microbatches: Parts of the group's batch, the same for all chains.

    Raises:
        ScheduleError: The schedule is unknown.
    """
    first = _Line(name, chains, num_devices, num_microbatches, {})
    second = _Line(name, chains, num_devices, num_microbatches, first.tails())
    best = min((first, second), key=lambda line: max(line.free))
    return Schedule(tuple(map(tuple, best.orders)))


class _Line:
    """One simulation: what is left of each stage's order, and when devices and inputs are there.

    Of ops that can start at once the one with the larger `urgency` goes first.
    """

    def __init__(
        self,
        name: str,
        chains: Sequence[Chain],
        num_devices: int,
        num_microbatches: int,
        urgency: Mapping[Op, int],
    ) -> None:
        self.urgency = urgency
        self.orders: list[list[Op]] = [[] for _ in range(num_devices)]
        self.free = [0] * num_devices
        self.ends: dict[Op, int] = {}
        self.left: dict[int, list[Op]] = {}
        self.devices: dict[int, tuple[int, ...]] = {}
        self.lengths: dict[int, tuple[int, int]] = {}
        self.neighbours: dict[int, tuple[int | None, int | None, int | None]] = {}
        for chain in chains:
            own = build_schedule(
                name,
                num_stages=len(chain.stages),
                num_microbatches=num_microbatches,
                self_conditioned=chain.self_conditioned,
            )
            feeds_back = chain.stages[-1] if chain.self_conditioned else None
            before = (None, *chain.stages[:-1])
            after = (*chain.stages[1:], None)
            for i, (stage, order) in enumerate(zip(chain.stages, own.orders, strict=True)):
                self.left[stage] = [Op(stage, op.kind, op.microbatch) for op in reversed(order)]
                self.devices[stage] = chain.devices[i]
                self.lengths[stage] = chain.lengths[i] if chain.lengths else UNIT
                self.neighbours[stage] = (before[i], after[i], feeds_back)
        for _ in range(sum(map(len, self.left.values()))):
            self._place()

    def _place(self) -> None:
        """Place one more op."""
        found = [
            (start, -self.urgency.get(op, 0), op.kind is not OpKind.B, op.microbatch, stage)
            for stage, ops in self.left.items()
            for op in ops[-1:]
            if (start := self._start(op)) is not None
        ]
        *_, stage = min(found)
        op = self.left[stage].pop()
        start = self._start(op)
        assert start is not None
        self.ends[op] = end = start + self._length(op)
        for device in self.devices[stage]:
            self.free[device] = end
            self.orders[device].append(op)

    def tails(self) -> dict[Op, int]:
        """Longest way from each op's start to the end of its chain, on devices of its own."""
        found: dict[Op, int] = {}
        after: dict[Op, int] = {}  # of what waits for the op
        following: dict[int, int] = {}  # of what comes next on the stage
        for op in reversed(self.ends):  # ops were placed producers first
            rest = max(after.get(op, 0), following.get(op.stage, 0))
            found[op] = following[op.stage] = rest + self._length(op)
            for need in self._needs(op):
                after[need] = max(after.get(need, 0), found[op])
        return found

    def _length(self, op: Op) -> int:
        return self.lengths[op.stage][op.kind is OpKind.B]

    def _start(self, op: Op) -> int | None:
        """When an op can start; None while an input has no end yet."""
        start = max(self.free[device] for device in self.devices[op.stage])
        for need in self._needs(op):
            if need not in self.ends:
                return None
            start = max(start, self.ends[need])
        return start

    def _needs(self, op: Op) -> list[Op]:
        """What an op waits for on other stages. Skips follow from the chain."""
        before, after, feeds_back = self.neighbours[op.stage]
        if op.kind is OpKind.B:
            return [] if after is None else [Op(after, OpKind.B, op.microbatch)]
        if before is not None:
            return [Op(before, op.kind, op.microbatch)]
        if op.kind is OpKind.F and feeds_back is not None:
            return [Op(feeds_back, OpKind.S, op.microbatch)]
        return []

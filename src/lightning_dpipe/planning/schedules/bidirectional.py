"""Several backbones on the same devices, their pipelines in opposite directions.

In:     chains of stages with the devices and relative op lengths of each, a schedule's name.
Out:    one order of ops per device. Each chain keeps the named schedule's own order on every stage;
        which chain goes next on a device is decided by an event simulation.
Source: DiffusionPipe (arXiv 2405.01248), section 4.3; two directions as in Chimera (2107.06925).
        Ours differs: any number of chains of any lengths, so the order is found, not tabulated.

One chain's bubbles (late on its first stages' way up, early on its last) are filled by the other
one's ops. The order is a linear extension of the chains' dependencies, so it cannot deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dpipe.core.errors import ScheduleError
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
    earliest is placed; a backward before a forward (it frees activations), then the lowest
    micro-batch, then the lowest stage.

    Args:
        name: A key of `SCHEDULES`: each stage's own order.
        chains: The backbones; a device may be in any of them.
        num_devices: Devices of one pipeline.
        num_microbatches: Parts of the group's batch, the same for all chains.

    Raises:
        ScheduleError: The schedule is unknown, or a chain has no stage.
    """
    line = _Line(name, chains, num_devices, num_microbatches)
    while line.place():
        pass
    return Schedule(tuple(map(tuple, line.orders)))


class _Line:
    """The simulation: what is left of each stage's order, and when devices and inputs are there."""

    def __init__(
        self, name: str, chains: Sequence[Chain], num_devices: int, num_microbatches: int
    ) -> None:
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

    def place(self) -> bool:
        """Place one more op; False when all are."""
        found = [
            (start, op.kind is not OpKind.B, op.microbatch, stage)
            for stage, ops in self.left.items()
            for op in ops[-1:]
            if (start := self._start(op)) is not None
        ]
        if not found:
            stuck = [str(ops[-1]) for ops in self.left.values() if ops]
            if stuck:
                raise ScheduleError(
                    f"ops {', '.join(stuck)} wait for each other; every chain's own schedule must "
                    "be legal"
                )
            return False
        start, _, _, stage = min(found)
        op = self.left[stage].pop()
        end = start + self.lengths[stage][op.kind is OpKind.B]
        self.ends[op] = end
        for device in self.devices[stage]:
            self.free[device] = end
            self.orders[device].append(op)
        return True

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

"""Several backbones on the same devices, their pipelines in opposite directions.

In:     chains of stages with the devices and relative op lengths of each, a schedule's name.
Out:    one order of ops per device. Each chain keeps the named schedule's own order on every stage;
        which chain goes next on a device is decided by an event simulation.
Source: DiffusionPipe (arXiv 2405.01248), section 4.3; two directions as in Chimera (2107.06925).
        Ours differs: any number of chains of any lengths, so the order is found, not tabulated.

Where one chain waits for its first inputs or gradients the other one, coming from the other side,
works. The order is a linear extension of all chains' dependencies, so it cannot deadlock.
"""

from collections.abc import Iterable, Mapping, Sequence
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
        self.stages: dict[int, _Stage] = {}
        self.on: list[list[int]] = [[] for _ in range(num_devices)]
        for chain in chains:
            own = build_schedule(
                name,
                num_stages=len(chain.stages),
                num_microbatches=num_microbatches,
                self_conditioned=chain.self_conditioned,
            )
            for i, stage in enumerate(chain.stages):
                ops = reversed(own.orders[i])
                self.stages[stage] = _Stage(
                    left=[Op(stage, op.kind, op.microbatch) for op in ops],
                    devices=chain.devices[i],
                    lengths=chain.lengths[i] if chain.lengths else UNIT,
                    before=chain.stages[i - 1] if i else None,
                    after=chain.stages[i + 1] if i + 1 < len(chain.stages) else None,
                    first=chain.stages[0],
                    estimator=chain.stages[-1] if chain.self_conditioned else None,
                )
                for device in chain.devices[i]:
                    self.on[device].append(stage)
        self.next: dict[int, tuple[int, int, bool, int, int]] = {}
        self._look(self.stages)
        while self.next:
            self._place(min(self.next.values())[-1])
        assert not any(stage.left for stage in self.stages.values())

    def tails(self) -> dict[Op, int]:
        """Longest way from each op's start to the end of its chain, on devices of its own."""
        found: dict[Op, int] = {}
        after: dict[Op, int] = {}  # of what waits for the op
        following: dict[int, int] = {}  # of what comes next on the stage
        for op in reversed(self.ends):  # ops were placed producers first
            rest = max(after.get(op, 0), following.get(op.stage, 0))
            found[op] = following[op.stage] = rest + self.stages[op.stage].length(op)
            need = self.stages[op.stage].need(op)
            if need is not None:
                after[need] = max(after.get(need, 0), found[op])
        return found

    def _place(self, number: int) -> None:
        """Place the next op of a stage, and look again at what that may let start."""
        stage, start = self.stages[number], self.next[number][0]
        op = stage.left.pop()
        self.ends[op] = end = start + stage.length(op)
        touched = {n for n in (stage.before, stage.after, stage.first) if n is not None}
        for device in stage.devices:
            self.free[device] = end
            self.orders[device].append(op)
            touched.update(self.on[device])
        self._look(touched)

    def _look(self, numbers: Iterable[int]) -> None:
        """Note when the next op of each of these stages can start, if its input has an end."""
        for number in numbers:
            stage = self.stages[number]
            self.next.pop(number, None)
            if not stage.left:
                continue
            op = stage.left[-1]
            need = stage.need(op)
            if need is None or need in self.ends:
                start = max(self.free[device] for device in stage.devices)
                start = max(start, 0 if need is None else self.ends[need])
                urgent = -self.urgency.get(op, 0)
                self.next[number] = (start, urgent, op.kind is not OpKind.B, op.microbatch, number)


@dataclass(slots=True, kw_only=True)
class _Stage:
    """A stage's ops that are left, last one first, and its neighbours in the chain."""

    left: list[Op]
    devices: tuple[int, ...]
    lengths: tuple[int, int]
    before: int | None
    after: int | None
    first: int
    estimator: int | None

    def length(self, op: Op) -> int:
        return self.lengths[op.kind is OpKind.B]

    def need(self, op: Op) -> Op | None:
        """What an op waits for on another stage. Skips follow from the chain."""
        kind, other = op.kind, self.after if op.kind is OpKind.B else self.before
        if kind is OpKind.F and self.before is None:
            kind, other = OpKind.S, self.estimator
        return None if other is None else Op(other, kind, op.microbatch)

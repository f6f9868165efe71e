"""One walk over a pipeline that fills each bubble as it opens.

In:     the tasks of a step, the frozen work, who encodes which samples, a rule and a target end.
Out:    what is encoded after how many ops of each device, and when the iteration ends.
"""

from dataclasses import dataclass, field
from functools import cached_property

from lightning_dpipe.core.fills import Run
from lightning_dpipe.planning.backlog import Backlog, FrozenCosts, Piece
from lightning_dpipe.simulation.clock import Clock, Task, TaskGraph
from lightning_dpipe.simulation.deliveries import Arrivals, Deliveries


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a walk fills bubbles.

    `order` is the rank of each layer, None takes the longest first. `eager` also delays ops that
    could start at once. `stretch` is the share of an op's slack that may be used up. Devices in
    `whole` split no layer's batch.
    """

    order: tuple[int, ...] | None = None
    eager: bool = False
    stretch: float = 1.0
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be filled with what; the same for all walks."""

    graph: TaskGraph
    works: tuple[FrozenCosts, ...]
    deliveries: Deliveries

    @property
    def work(self) -> FrozenCosts:
        """That of the first device: of all, where devices are alike."""
        return self.works[0]

    @cached_property
    def at_home(self) -> tuple[Run, ...]:
        """Every device encodes its own samples."""
        return tuple(Run(d, d, 0, self.work.samples) for d in range(self.graph.num_devices))

    @cached_property
    def loads_us(self) -> tuple[int, ...]:
        """Per device: its ops and its optimizer."""
        loads = list(self.graph.optimizer_us)
        for task in self.graph.tasks:
            loads[task.device] += task.length_us
        return tuple(loads)

    @property
    def path_us(self) -> int:
        """The longest chain of tasks and messages."""
        return max(self.graph.path_us)

    @cached_property
    def sends(self) -> tuple[tuple[int, ...], ...]:
        """Per frozen layer: the values that leave for stages of the next step."""
        return tuple(self.deliveries.written[x.component][x.index] for x in self.work.layers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Pieces by (device, number of ops before them), each device's end, and that of deliveries.

    Ends are without the profile's overhead: no fill changes that.
    """

    slots: dict[tuple[int, int], list[Piece]]
    device_end_us: tuple[int, ...]
    delivered_us: int = 0
    runs: tuple[Run, ...] = field(default=())

    @property
    def end_us(self) -> int:
        """End of the iteration."""
        return max(*self.device_end_us, self.delivered_us)


def place(
    problem: Problem, runs: tuple[Run, ...], rule: Rule, target_us: int | None = None
) -> Placement:
    """Walk the pipeline once.

    Without a target a fill ends before the op after it could start anyway; with one it may run
    until that op must start for the iteration to end at `target_us`. An op that could start at
    once is delayed by an eager rule only. A device does its own samples before those of others.
    """
    walk = _Walk(problem, runs, rule, target_us)
    for task, path_us in zip(problem.graph.tasks, problem.graph.path_us, strict=True):
        walk.run(task, path_us)
    return walk.finish()


class _Walk:
    def __init__(
        self, problem: Problem, runs: tuple[Run, ...], rule: Rule, target_us: int | None
    ) -> None:
        self.problem, self.runs, self.rule, self.target_us = problem, runs, rule, target_us
        self.clock = Clock(problem.graph)
        self.arrivals = Arrivals(problem.deliveries, runs)
        self.num_done = [0] * problem.graph.num_devices
        self.slots: dict[tuple[int, int], list[Piece]] = {}
        self.backlogs: list[list[Backlog]] = [[] for _ in self.num_done]
        for run in sorted(runs, key=lambda r: r.owner != r.device):
            self.backlogs[run.device].append(
                Backlog(
                    problem.works[run.device],
                    partial=run.device not in rule.whole,
                    order=rule.order,
                    rows=(run.first, run.last),
                    owner=None if run.owner == run.device else run.owner,
                )
            )

    def run(self, task: Task, path_us: int) -> None:
        clock, rule, d = self.clock, self.rule, task.device
        until_us = clock.ready_us(task)
        if self.target_us is not None and (rule.eager or until_us > clock.free_us[d]):
            slack_us = self.target_us - path_us - max(until_us, clock.free_us[d])
            until_us = max(until_us, clock.free_us[d]) + max(0, int(slack_us * rule.stretch))
        for backlog in self.backlogs[d]:
            start_us = self._start_us(d, backlog)
            if until_us > start_us:
                self._keep(d, backlog, start_us, backlog.pack(until_us - start_us))
        self.arrivals.started(task, clock.run(task))
        self.num_done[d] += 1

    def finish(self) -> Placement:
        """What is left over, and the sending."""
        for d, backlogs in enumerate(self.backlogs):
            for backlog in backlogs:
                self._keep(d, backlog, self._start_us(d, backlog), backlog.drain())
            self.arrivals.hand_over(self.clock, d)
        return Placement(self.slots, self.clock.device_end_us(), self.arrivals.end_us(), self.runs)

    def _start_us(self, device: int, backlog: Backlog) -> int:
        """Another device's samples wait for their batch fields."""
        if backlog.owner is None:
            return self.clock.free_us[device]
        fields_us = self.arrivals.fields_us(device, backlog.owner)
        return max(self.clock.free_us[device], fields_us)

    def _keep(
        self, device: int, backlog: Backlog, at_us: int, packed: tuple[list[Piece], int]
    ) -> None:
        pieces, spent_us = packed
        if not pieces:
            return
        self.slots.setdefault((device, self.num_done[device]), []).extend(pieces)
        self.clock.free_us[device] = at_us + spent_us
        home = device if backlog.owner is None else backlog.owner
        work, last = self.problem.works[device], None
        for piece in pieces:
            new = last is None or not work.prolongs(piece, last)
            at_us += work.cost_us(piece.layer, piece.last - piece.first) + new * work.fill_us
            values = self.problem.sends[piece.layer]
            if values:
                self.arrivals.encoded(device, home, values, (piece.first, piece.last), at_us)
            last = piece

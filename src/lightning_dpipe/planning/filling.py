"""Bubble filling: place the next batch's frozen work so that the iteration ends as early as it can.

In:     a Plan without fills, its Schedule and Profile.
Out:    Fill tuples that cover every frozen layer and every local sample of every device once;
        what fits into no bubble follows the device's last op.
Source: DiffusionPipe (arXiv 2405.01248), section 5. Ours differs: the objective is the simulated
        end of the iteration with leftovers and gradient reduction, not the time filled.

First every bubble of the unfilled pipeline takes what fits without delaying any op. Where that
leaves idle time, further placements may delay ops that are not critical: for a target end T each
op has a latest start (T minus its longest way to the end), and a bubble may be stretched until
then. The best of a few targets is kept only if it ends the iteration visibly earlier, as it uses up
slack that absorbs noise. Last, devices that can afford it do without partial batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.backlog import Backlog, FrozenCosts, Piece
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.clock import Clock, TaskGraph
from lightning_dpipe.simulation.simulate import steady_shape
from lightning_dpipe.simulation.tasks import task_graph

FILL_OVERHEAD_US = 100
"""What starting one more fill is taken to cost: a launch from Python and the message it causes."""

_WORTH_IT = 500
"""Slack is given up only for at least one part in this many of the iteration."""

_FEWEST_TARGETS, _MOST_TARGETS, _TASKS_WALKED = 4, 16, 8192
"""Targets tried: as many as walk about that many tasks, so that planning stays below a second."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Pieces by (device, number of ops before them), and each device's end without overhead."""

    slots: dict[tuple[int, int], list[Piece]]
    device_end_us: tuple[int, ...]

    @property
    def end_us(self) -> int:
        """End of the iteration, without the profile's overhead: no fill changes that."""
        return max(self.device_end_us)


def fill(
    plan: Plan,
    schedule: Schedule,
    profile: Profile,
    *,
    self_conditioned: bool = False,
    fill_overhead_us: int = FILL_OVERHEAD_US,
) -> tuple[Fill, ...]:
    """Place all frozen work of the next batch.

    Args:
        plan: Stages, devices and batch; its own fills are ignored.
        schedule: Order of ops per device, of the variant that `self_conditioned` names.
        profile: Costs.
        self_conditioned: Marks the fills as those of the schedule with S ops.
        fill_overhead_us: Room a bubble must have beside the time of each fill in it.

    Returns:
        Fills sorted by device, each device's in run order. Empty if there is nothing frozen.

    Raises:
        PlanError: The plan does not fit the schedule.
        ScheduleError: The schedule would deadlock.
    """
    work = FrozenCosts.of(profile, samples=plan.batch_size, overhead_us=fill_overhead_us)
    if not work.layers:
        return ()
    graph = task_graph(plan, schedule, profile, _encoded_shape(plan, schedule))
    best = _best_placement(graph, work)
    return tuple(
        replace(fill, self_conditioned=self_conditioned)
        for (device, num_done), pieces in sorted(best.slots.items())
        for fill in work.fills(
            pieces, device, schedule.orders[device][num_done - 1] if num_done else None
        )
    )


def lower_bound_us(plan: Plan, profile: Profile, *, self_conditioned: bool = False) -> int:
    """No placement of fills ends the iteration earlier than this.

    The larger of the schedule's own end without frozen work, and the most loaded device: its ops,
    its frozen work at the best batch sizes, its optimizer, and the profile's overhead.
    """
    schedule = schedule_of(plan, self_conditioned=self_conditioned)
    graph = task_graph(plan, schedule, profile, _encoded_shape(plan, schedule))
    work = FrozenCosts.of(profile, samples=plan.batch_size, overhead_us=0)
    clock = Clock(graph)
    loads_us = [optimizer + least_frozen_us(work) for optimizer in graph.optimizer_us]
    for task in graph.tasks:
        clock.run(task)
        loads_us[task.device] += task.length_us
    return max(clock.end_us(), max(loads_us) + graph.overhead_us)


def least_frozen_us(work: FrozenCosts) -> int:
    """Least time of one local batch: each layer at the batch size with the best rate."""
    b, total_us = work.samples, 0
    for i in range(len(work.layers)):
        total_us += min(-(-work.cost_us(i, n) * b // n) for n in range(1, b + 1))
    return total_us


def _encoded_shape(plan: Plan, schedule: Schedule) -> StepShape:
    """A step of the steady state in which nothing is left to encode."""
    return replace(steady_shape(plan, schedule), encoded=True, next_sizes=None)


def _best_placement(graph: TaskGraph, work: FrozenCosts) -> Placement:
    partial = [True] * graph.num_devices
    target_us: int | None = None
    best = _place(graph, work, partial, None)
    low, high = _floor_us(graph, work), best.end_us
    if (high - low) * _WORTH_IT > high:
        num = max(_FEWEST_TARGETS, min(_MOST_TARGETS, _TASKS_WALKED // len(graph.tasks)))
        # Ends are not monotone in the target (pieces are coarse), so a grid and not a bisection.
        for target in (low + (high - low) * i // num for i in range(num)):
            found = _place(graph, work, partial, target)
            least_gain_us = high // _WORTH_IT if target_us is None else 0
            if found.end_us < best.end_us - least_gain_us:
                best, target_us = found, target
    return _without_partials(graph, work, best, target_us)


def _without_partials(
    graph: TaskGraph, work: FrozenCosts, best: Placement, target_us: int | None
) -> Placement:
    """Fewer, fuller fills on the devices whose end leaves room for it."""
    whole = _place(graph, work, [False] * graph.num_devices, target_us)
    partial = [end_us > best.end_us for end_us in whole.device_end_us]
    if not any(partial):
        return whole
    mixed = _place(graph, work, partial, target_us)
    return mixed if mixed.end_us <= best.end_us else best


def _floor_us(graph: TaskGraph, work: FrozenCosts) -> int:
    """The earliest target worth a try: critical path, and each device's work at full batches."""
    frozen_us = sum(work.cost_us(i, work.samples) for i in range(len(work.layers)))
    loads_us = [optimizer + frozen_us for optimizer in graph.optimizer_us]
    for task in graph.tasks:
        loads_us[task.device] += task.length_us
    return max(max(graph.path_us), *loads_us)


def _place(
    graph: TaskGraph, work: FrozenCosts, partial: Sequence[bool], target_us: int | None
) -> Placement:
    """Walk the pipeline once, filling each bubble as it opens.

    Without a target a fill ends before the op after it could start anyway; with one it may run
    until that op must start for the iteration to end at `target_us`. An op that could start at
    once is never delayed.
    """
    clock = Clock(graph)
    backlogs = [Backlog(work, partial=p) for p in partial]
    num_done = [0] * graph.num_devices
    slots: dict[tuple[int, int], list[Piece]] = {}
    for task, path_us in zip(graph.tasks, graph.path_us, strict=True):
        d = task.device
        until_us = clock.ready_us(task)
        if target_us is not None and until_us > clock.free_us[d]:
            until_us = max(until_us, target_us - path_us)
        if until_us > clock.free_us[d]:
            pieces, used_us = backlogs[d].pack(until_us - clock.free_us[d])
            if pieces:
                slots[d, num_done[d]] = pieces
                clock.free_us[d] += used_us
        clock.run(task)
        num_done[d] += 1
    for d, backlog in enumerate(backlogs):
        pieces, used_us = backlog.drain()
        slots.setdefault((d, num_done[d]), []).extend(pieces)
        clock.free_us[d] += used_us
    return Placement(slots, clock.device_end_us())

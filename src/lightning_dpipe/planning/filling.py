"""Bubble filling: place the next batch's frozen work so that the iteration ends as early as it can.

In:     a Plan without fills, its Schedule and Profile.
Out:    Fill tuples that cover every frozen layer and every local sample of every device once;
        what fits into no bubble follows the device's last op.
Source: DiffusionPipe (arXiv 2405.01248), section 5. Ours differs: the objective is the simulated
        end of the iteration with leftovers and gradient reduction, not the time filled.

First every bubble of the unfilled pipeline takes what fits without delaying any op. Where that
leaves idle time, further placements may delay ops that are not critical: for a target end T each
op has a latest start (T minus its longest way to the end), and a bubble may be stretched until
then. Targets are tried with layers longest first and in run order, then with shuffled priorities,
stretches and devices that split no batch, until one ends near the floor. The best is kept only if
it ends the iteration visibly earlier, as it uses up slack that absorbs noise. Last, devices that
can afford it do without partial batches.
"""

import random
from collections.abc import Iterator
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

_FEWEST_TARGETS, _MOST_TARGETS, _MOST_SHUFFLES, _WALKED = 4, 16, 128, 50_000
"""Walks tried: about as many as pass so many (task, frozen layer) pairs, so that planning a large
pipeline stays fast and a small one is filled nearly optimally."""


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
    partial: bool = True,
) -> tuple[Fill, ...]:
    """Place all frozen work of the next batch.

    Args:
        plan: Stages, devices and batch; its own fills are ignored.
        schedule: Order of ops per device, of the variant that `self_conditioned` names.
        profile: Costs.
        self_conditioned: Marks the fills as those of the schedule with S ops.
        fill_overhead_us: Room a bubble must have beside the time of each fill in it.
        partial: Whether a layer's batch may be split over bubbles; False is for ablations.

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
    best = _best_placement(graph, work, partial=partial)
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


def _best_placement(graph: TaskGraph, work: FrozenCosts, *, partial: bool) -> Placement:
    """The first walk that comes near the floor, else the best of all rules and targets."""
    every = frozenset(range(graph.num_devices))
    rule, target_us = Rule(whole=frozenset() if partial else every), None
    best = first = _place(graph, work, rule, None)
    low = _floor_us(graph, work)
    for tried, share in _tries(graph, work):
        if (best.end_us - low) * _WORTH_IT <= best.end_us:
            break
        target = low + int((first.end_us - low) * share)
        if not partial:
            tried = replace(tried, whole=every)
        found = _place(graph, work, tried, target)
        least_gain_us = first.end_us // _WORTH_IT if target_us is None else 0
        if found.end_us < best.end_us - least_gain_us:
            best, rule, target_us = found, tried, target
    if not partial:
        return best
    return _without_partials(graph, work, best, rule, target_us)


def _tries(graph: TaskGraph, work: FrozenCosts) -> Iterator[tuple[Rule, float]]:
    """Rules and targets (as shares of the way from the floor to the first placement's end).

    Ends are not monotone in the target (pieces are coarse), so a grid and not a bisection. Behind
    the grid come shuffled priorities, the same ones every time: what a layer order leaves over in
    samples that are too large for the last bubbles, another order may fit.
    """
    walks = _WALKED // (len(graph.tasks) * len(work.layers))
    num = max(_FEWEST_TARGETS, min(_MOST_TARGETS, walks // 4))
    in_order = tuple(range(len(work.layers)))
    for order in (None, in_order):
        for eager in (False, True):
            for i in range(num):
                yield Rule(order=order, eager=eager), i / num
    chance = random.Random(len(graph.tasks))
    for _ in range(min(_MOST_SHUFFLES, walks)):
        order = tuple(chance.sample(in_order, len(in_order)))
        whole = frozenset(d for d in range(graph.num_devices) if chance.random() < 0.5)
        eager, stretch = chance.random() < 0.5, chance.random()
        yield Rule(order=order, eager=eager, stretch=stretch, whole=whole), chance.random()


def _without_partials(
    graph: TaskGraph, work: FrozenCosts, best: Placement, rule: Rule, target_us: int | None
) -> Placement:
    """Fewer, fuller fills on the devices whose end leaves room for it."""
    whole = _place(graph, work, replace(rule, whole=frozenset(range(graph.num_devices))), target_us)
    devices = [d for d, end_us in enumerate(whole.device_end_us) if end_us <= best.end_us]
    if len(devices) == graph.num_devices:
        return whole
    mixed = _place(graph, work, replace(rule, whole=frozenset(devices)), target_us)
    return mixed if mixed.end_us <= best.end_us else best


def _floor_us(graph: TaskGraph, work: FrozenCosts) -> int:
    """The earliest target worth a try: critical path, and each device's work at full batches."""
    frozen_us = sum(work.cost_us(i, work.samples) for i in range(len(work.layers)))
    loads_us = [optimizer + frozen_us for optimizer in graph.optimizer_us]
    for task in graph.tasks:
        loads_us[task.device] += task.length_us
    return max(max(graph.path_us), *loads_us)


def _place(graph: TaskGraph, work: FrozenCosts, rule: Rule, target_us: int | None) -> Placement:
    """Walk the pipeline once, filling each bubble as it opens.

    Without a target a fill ends before the op after it could start anyway; with one it may run
    until that op must start for the iteration to end at `target_us`. An op that could start at
    once is delayed by an eager rule only.
    """
    clock = Clock(graph)
    backlogs = [
        Backlog(work, partial=d not in rule.whole, order=rule.order)
        for d in range(graph.num_devices)
    ]
    num_done = [0] * graph.num_devices
    slots: dict[tuple[int, int], list[Piece]] = {}
    for task, path_us in zip(graph.tasks, graph.path_us, strict=True):
        d = task.device
        until_us = clock.ready_us(task)
        if target_us is not None and (rule.eager or until_us > clock.free_us[d]):
            slack_us = target_us - path_us - max(until_us, clock.free_us[d])
            until_us = max(until_us, clock.free_us[d]) + max(0, int(slack_us * rule.stretch))
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

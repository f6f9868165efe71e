"""Bubble filling: place the next batch's frozen work so that the iteration ends as early as it can.

In:     a Plan without fills, its Schedule and Profile.
Out:    Fill tuples that cover every frozen layer and every local sample of every device once;
        what fits into no bubble follows the last op of the device that encodes it.
Source: DiffusionPipe (arXiv 2405.01248), section 5. Ours differs: the objective is the simulated
        end of the iteration with leftovers, gradient reduction and deliveries, not the time filled.

First every bubble of the unfilled pipeline takes what fits without delaying any op. Where that
leaves idle time, further placements may delay ops that are not critical: for a target end T each
op has a latest start (T minus its longest way to the end), and a bubble may be stretched until
then. Targets are tried with layers longest first and in run order, then with shuffled priorities,
stretches and devices that split no batch, until one ends near the floor. The best is kept only if
it ends the iteration visibly earlier, as it uses up slack that absorbs noise. Where devices have
different idle time, samples then move to other devices of the group (`moving`), kept likewise.
Devices that can afford it do without partial batches.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from lightning_dpipe.core.fills import Run
from lightning_dpipe.core.fleet import kinds_in_groups
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.moving import nudged, runs_for, shared_floor_us
from lightning_dpipe.planning.placing import Placement, Problem, Rule, place
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.clock import Clock
from lightning_dpipe.simulation.deliveries import Deliveries
from lightning_dpipe.simulation.simulate import steady_shape
from lightning_dpipe.simulation.tasks import task_graph

_WORTH_IT = 500
"""Slack is given up, or samples moved, only for at least one part in this many of the iteration."""

_FEWEST_TARGETS, _MOST_TARGETS, _MOST_SHUFFLES, _WALKED = 4, 16, 128, 50_000
"""Walks tried: about as many as pass so many (task, frozen layer) pairs, so that planning a large
pipeline stays fast and a small one is filled nearly optimally."""

_MOVE_TARGETS, _MOST_NUDGES = 8, 16
"""Target ends for which samples are moved, and corrections of the best of them."""


def fill(
    plan: Plan,
    schedule: Schedule,
    profile: Profile,
    *,
    self_conditioned: bool = False,
    partial: bool = True,
    move: bool = True,
) -> tuple[Fill, ...]:
    """Place all frozen work of the next batch.

    Args:
        plan: Stages, devices and batch; its own fills are ignored.
        schedule: Order of ops per device, of the variant that `self_conditioned` names.
        profile: Costs.
        self_conditioned: Marks the fills as those of the schedule with S ops.
        partial: Whether a layer's batch may be split over bubbles; False is for ablations, and
            moves no samples.
        move: Whether a device may encode samples of another one of its group.

    Returns:
        Fills sorted by device, each device's in run order. Empty if there is nothing frozen.

    Raises:
        PlanError: The plan does not fit the schedule.
        ScheduleError: The schedule would deadlock.
    """
    works = _works(plan, profile)
    if not works[0].layers:
        return ()
    problem = Problem(
        graph=task_graph(plan, schedule, profile, _encoded_shape(plan, schedule)),
        works=works,
        deliveries=Deliveries(
            plan=plan, profile=profile, sizes=(plan.batch_size,) * plan.num_devices
        ),
    )
    best = _best_placement(problem, problem.at_home, partial=partial)
    if move and partial and plan.num_devices > 1 and not profile.kinds:
        best = _best_move(problem, best)
    return tuple(
        replace(fill, self_conditioned=self_conditioned)
        for (device, num_done), pieces in sorted(best.slots.items())
        for fill in works[device].fills(
            pieces, device, schedule.orders[device][num_done - 1] if num_done else None
        )
    )


def lower_bound_us(plan: Plan, profile: Profile, *, self_conditioned: bool = False) -> int:
    """No placement of fills ends the iteration earlier than this.

    The larger of the schedule's own end without frozen work, and the mean over a group's devices of
    all that they do: ops, optimizer, frozen work at the best batch sizes, which may move between
    them; and the profile's overhead.
    """
    schedule = schedule_of(plan, self_conditioned=self_conditioned)
    graph = task_graph(plan, schedule, profile, _encoded_shape(plan, schedule))
    frozen_us = [work.least_us for work in _works(plan, profile)]
    clock = Clock(graph)
    loads_us = [a + b for a, b in zip(graph.optimizer_us, frozen_us, strict=True)]
    for task in graph.tasks:
        clock.run(task)
        loads_us[task.device] += task.length_us
    # Devices of several kinds keep their samples.
    load_us = max(loads_us) if profile.kinds else -(-sum(loads_us) // graph.num_devices)
    return max(clock.end_us(), load_us + graph.overhead_us)


def _works(plan: Plan, profile: Profile) -> tuple[FrozenCosts, ...]:
    """Per device: its frozen work, at the costs of its kind."""
    kinds = kinds_in_groups(plan, profile)
    by_kind = {
        kind: FrozenCosts.of(profile.of_kind(kind), samples=plan.batch_size) for kind in set(kinds)
    }
    return tuple(by_kind[kind] for kind in kinds)


def _encoded_shape(plan: Plan, schedule: Schedule) -> StepShape:
    """A step of the steady state in which nothing is left to encode."""
    return replace(steady_shape(plan, schedule), encoded=True, next_sizes=None)


def _best_placement(problem: Problem, runs: tuple[Run, ...], *, partial: bool) -> Placement:
    """The first walk that comes near the floor, else the best of all rules and targets."""
    every = frozenset(range(problem.graph.num_devices))
    rule, target_us = Rule(whole=frozenset() if partial else every), None
    best = first = place(problem, runs, rule)
    low = _floor_us(problem, runs)
    for tried, share in _tries(problem):
        if (best.end_us - low) * _WORTH_IT <= best.end_us:
            break
        target = low + int((first.end_us - low) * share)
        if not partial:
            tried = replace(tried, whole=every)
        found = place(problem, runs, tried, target)
        least_gain_us = first.end_us // _WORTH_IT if target_us is None else 0
        if found.end_us < best.end_us - least_gain_us:
            best, rule, target_us = found, tried, target
    if not partial:
        return best
    return _without_partials(problem, best, rule, target_us)


def _best_move(problem: Problem, home: Placement) -> Placement:
    """The best placement with samples moved, if it ends visibly earlier than without."""
    low = shared_floor_us(problem)
    if (home.end_us - low) * _WORTH_IT <= home.end_us:
        return home
    best = home
    tried = {home.runs}
    for i in range(_MOVE_TARGETS):
        target_us = low + (home.end_us - low) * i // _MOVE_TARGETS
        runs = runs_for(problem, target_us)
        if runs not in tried:
            tried.add(runs)
            best = min(best, _quick(problem, runs, target_us), key=lambda x: x.end_us)
    for _ in range(_MOST_NUDGES):
        if (best.end_us - low) * _WORTH_IT <= best.end_us:
            break
        found = best
        for runs in nudged(problem, best):
            if runs not in tried:
                tried.add(runs)
                found = _quick(problem, runs, best.end_us)
                if found.end_us < best.end_us:
                    break
        if found.end_us >= best.end_us:
            break
        best = found
    if best.runs == home.runs:
        return home
    best = min(best, _best_placement(problem, best.runs, partial=True), key=lambda x: x.end_us)
    return best if best.end_us < home.end_us - home.end_us // _WORTH_IT else home


def _quick(problem: Problem, runs: tuple[Run, ...], target_us: int) -> Placement:
    """A good placement from a few walks."""
    walks = [place(problem, runs, Rule())]
    in_order = tuple(range(len(problem.work.layers)))
    for order in (None, in_order):
        for eager in (False, True):
            walks.append(place(problem, runs, Rule(order=order, eager=eager), target_us))
    return min(walks, key=lambda x: x.end_us)


def _tries(problem: Problem) -> Iterator[tuple[Rule, float]]:
    """Rules and targets (as shares of the way from the floor to the first placement's end).

    Ends are not monotone in the target (pieces are coarse), so a grid and not a bisection. Behind
    the grid come shuffled priorities, the same ones every time: what a layer order leaves over in
    samples that are too large for the last bubbles, another order may fit.
    """
    graph, layers = problem.graph, problem.work.layers
    walks = _WALKED // (len(graph.tasks) * len(layers))
    num = max(_FEWEST_TARGETS, min(_MOST_TARGETS, walks // 4))
    in_order = tuple(range(len(layers)))
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
    problem: Problem, best: Placement, rule: Rule, target_us: int | None
) -> Placement:
    """Fewer, fuller fills on the devices whose end leaves room for it."""
    every = frozenset(range(problem.graph.num_devices))
    whole = place(problem, best.runs, replace(rule, whole=every), target_us)
    devices = [d for d, end_us in enumerate(whole.device_end_us) if end_us <= best.end_us]
    if whole.end_us <= best.end_us:
        return whole
    mixed = place(problem, best.runs, replace(rule, whole=frozenset(devices)), target_us)
    return mixed if mixed.end_us <= best.end_us else best


def _floor_us(problem: Problem, runs: tuple[Run, ...]) -> int:
    """The earliest target worth a try: critical path, and each device's work at full batches."""
    loads_us = [
        load_us + host_us
        for load_us, host_us in zip(problem.loads_us, problem.deliveries.host_us(runs), strict=True)
    ]
    for run in runs:
        loads_us[run.device] += problem.works[run.device].chain_us(run.last - run.first)
    return max(problem.path_us, *loads_us)

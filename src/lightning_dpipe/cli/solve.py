"""From a `Problem` to its plan and everything that is said about it.

In: a Problem. Out: a `Solution`: plan, predicted timelines, memory, traffic, alternatives, limits.
Pure but for the progress of a long search.
"""

from dataclasses import dataclass, replace

from lightning_dpipe.cli.problem import Problem
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.origin import origin_of
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.auto import Progress, search
from lightning_dpipe.planning.baselines import Alternative, compare, useful_ratio
from lightning_dpipe.planning.explain import Limit, limits, reasons
from lightning_dpipe.planning.mixed import search_mixed
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import MEASURED_MARGIN, make_plan
from lightning_dpipe.planning.traffic import Traffic, traffic
from lightning_dpipe.simulation.memory import DeviceMemory, peak_memory
from lightning_dpipe.strategy.callbacks.plan_artifact import predictions


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan and what is predicted of it. `profile` has the links that its pipelines see."""

    plan: Plan
    profile: Profile
    unfilled: Timeline
    filled: Timeline
    memory: tuple[DeviceMemory, ...]
    traffic: tuple[Traffic, ...]
    alternatives: tuple[Alternative, ...]
    limits: tuple[Limit, ...]
    reasons: tuple[str, ...]
    useful_ratio: float
    num_plans: int | None


def solve(problem: Problem, progress: Progress | None = None, plan: Plan | None = None) -> Solution:
    """Plan, unless the plan is there, and predict.

    Raises:
        PlanError: No plan fits.
    """
    num_plans, bound_us = None, None
    options, base = problem.options, problem.profile
    margin = 0.0 if base.estimated else MEASURED_MARGIN
    if options.searches:
        space = replace(
            options.space(problem.world_size),
            schedules=(options.schedule,),
            fill=problem.fill,
            probability=problem.probability,
            network=problem.network,
            margin=margin,
        )
        found = (search_mixed if base.kinds else search)(
            base,
            world_size=problem.world_size,
            batch_size=problem.batch_size,
            space=space,
            progress=progress,
        )
        plan, num_plans, bound_us = found.plan, found.num_plans, found.bound_us
    elif plan is None:
        plan = make_plan(
            base,
            world_size=problem.world_size,
            batch_size=problem.batch_size,
            num_stages=options.num_stages,
            num_microbatches=options.num_microbatches,
            schedule=options.schedule,
            fill=problem.fill,
            cuts=options.cuts,
            network=problem.network,
        )
    seen = base if problem.network is None else problem.network.placed(base, plan)
    plan = replace(plan, profile_digest=digest(seen), origin=origin_of(seen))
    unfilled, filled = predictions(plan, seen)
    memory = peak_memory(plan, schedule_of(plan), seen)
    alternatives = compare(plan, base, network=problem.network, probability=problem.probability)
    return Solution(
        plan=plan,
        profile=seen,
        unfilled=unfilled,
        filled=filled,
        memory=memory,
        traffic=traffic(plan, seen.graph),
        alternatives=alternatives,
        limits=limits(plan, seen, unfilled, filled, memory),
        reasons=reasons(
            alternatives,
            given=_given(problem),
            num_plans=num_plans,
            bound_us=bound_us,
            margin=margin,
        ),
        useful_ratio=useful_ratio(plan, seen, alternatives[0].iteration_us, problem.probability),
        num_plans=num_plans,
    )


def _given(problem: Problem) -> dict[str, object]:
    """Numbers that the user fixed."""
    names = ("num_stages", "num_microbatches", "cuts")
    values = {name: getattr(problem.options, name) for name in names}
    return {name: value for name, value in values.items() if value not in (None, "auto")}

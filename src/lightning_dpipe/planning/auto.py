"""Search over stages, micro-batches, devices of a group, replicas, recomputation and schedule.

In:     a Profile, the world, the batch per device, and what the user fixed.
Out:    the best plan found, its expected iteration, and a bound that no plan of the space beats.

A group of D devices runs S stages, M micro-batches; the rest of the world are data-parallel groups.
S = 1 is plain data parallelism, a plan like any other; so are several stages on one device
(`buckets`). Every (D, M, S, schedule) has a lower bound (`bounds`), and so has every cut inside it
(`best_first`): cuts are simulated in rounds, the most promising first, until the best simulated
iteration is within `Space.close` of all that is left.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.configs import configs_of, places
from lightning_dpipe.planning.network import Network as Network
from lightning_dpipe.planning.pair_cuts import in_order
from lightning_dpipe.planning.rounds import Config, Rounds
from lightning_dpipe.planning.space import MICROBATCHES as MICROBATCHES
from lightning_dpipe.planning.space import Space as Space
from lightning_dpipe.planning.stage_costs import Cutting
from lightning_dpipe.planning.variants import (
    expected_bound_us,
    expected_us,
    filler_of,
    with_fills,
)

Progress = Callable[[int, float, float], None]
"""Called after each plan that was simulated with (plans tried, best iteration, bound), in us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan, its expected iteration, the bound on all plans, and how many were tried."""

    plan: Plan
    expected_us: float
    bound_us: float
    num_plans: int


def search(
    profile: Profile,
    *,
    world_size: int,
    batch_size: int,
    space: Space | None = None,
    progress: Progress | None = None,
    configs: Iterable[Config] | None = None,
) -> Found:
    """Find the plan with the shortest expected iteration.

    Args:
        profile: Costs of the model on one kind of device.
        world_size: All ranks.
        batch_size: Samples per device.
        space: What may be chosen.
        progress: Called after each plan that was simulated.
        configs: What to choose from, by default everything that the space allows (but see `mixed`).

    Raises:
        PlanError: No plan fits the numbers, the model or the memory.
        UnsupportedError: A backbone reads what another one writes.
    """
    space = Space() if space is None else space
    filler = filler_of(space.fill)
    base = Plan(
        graph_digest=digest(profile.graph),
        profile_digest=digest(profile),
        groups=default_groups(world_size, 1),
        stages=(),
        num_microbatches=1,
        batch_size=batch_size,
        schedule=space.schedules[0],
    )
    if configs is None:
        configs = configs_of(profile, space, world_size, batch_size, lambda: queue.limit_us)
    queue = Rounds(configs)
    found: dict[tuple[int, int], tuple[float, Plan]] = {}  # the best plan of each effort
    best_us, tried, at = float("inf"), 0, 0
    for config, stages in queue:
        plan, seen = _candidate(base, config, stages, profile, space)
        tried += 1
        if expected_bound_us(plan, seen, space.probability, filled=filler) < queue.limit_us:
            if filler is not None:
                plan = with_fills(plan, seen, fill=filler)
            plan_us = expected_us(plan, seen, space.probability)
            known = found.get(_effort(plan))
            if known is None or plan_us < known[0]:
                found[_effort(plan)] = plan_us, plan
            if plan_us < best_us:
                best_us, at = plan_us, tried
                queue.limit_us = best_us / (1 + space.close)
            if progress is not None:
                progress(tried, best_us, queue.bound_us)
        idle = found and space.max_idle is not None and tried - at >= space.max_idle
        if queue.bound_us >= queue.limit_us or tried >= space.max_plans or idle:
            break
    if not found:
        raise PlanError(_nothing_fits(profile, space, world_size, batch_size))
    best_us, best = found[
        min(e for e, (us, _) in found.items() if us <= best_us * (1 + space.margin))
    ]
    if space.network is not None and places(profile):
        best, best_us = space.network.place(
            best, profile, filler=filler, probability=space.probability
        )
    bound_us = min(queue.bound_us, best_us)
    return Found(plan=best, expected_us=best_us, bound_us=bound_us, num_plans=tried)


def _candidate(
    base: Plan, config: Config, stages: tuple[Stage, ...], profile: Profile, space: Space
) -> tuple[Plan, Profile]:
    """A plan of a configuration without fills, and the profile with the links that it sees."""
    plan = (config.plan or plan_of)(base, config.cutting, stages)
    if config.groups is not None:
        plan = replace(plan, groups=config.groups)
    if config.profile is not None:
        seen = config.profile
    else:
        seen = profile if space.network is None else space.network.placed(profile, plan)
    return in_order(plan, seen), seen


def _effort(plan: Plan) -> tuple[int, int]:
    """Stages that wait for each other, and micro-batches."""
    return (1 if plan.num_devices == 1 else len(plan.stages), plan.num_microbatches)


def plan_of(base: Plan, cutting: Cutting, stages: tuple[Stage, ...]) -> Plan:
    """Stages and a cutting as a plan without fills."""
    return replace(
        base,
        groups=default_groups(base.world_size, cutting.num_devices),
        stages=stages,
        num_microbatches=cutting.num_microbatches,
        schedule=cutting.schedule,
    )


def only_backbone(profile: Profile) -> str:
    """Name of the one backbone.

    Raises:
        UnsupportedError: There are several.
    """
    names = [c.name for c in profile.graph.backbones]
    if len(names) != 1:
        raise UnsupportedError(
            f"the model has {len(names)} backbones ({', '.join(names)}); a plan is made for "
            "exactly one: describe each backbone as a model of its own"
        )
    return names[0]


def _nothing_fits(profile: Profile, space: Space, world_size: int, batch_size: int) -> str:
    memory = profile.memory_bytes
    limit = "" if memory is None else f" within {memory / 2**30:.1f} GiB a device"
    return (
        f"no plan for {world_size} ranks with {batch_size} samples each{limit} "
        f"(num_stages={space.num_stages}, num_microbatches={space.num_microbatches}); "
        "leave more of these to the planner, use more devices or a smaller batch"
    )

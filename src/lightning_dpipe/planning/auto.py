"""Search over stages, micro-batches, devices of a group, replicas, recomputation and schedule.

In:     a Profile, the world, the batch per device, and what the user fixed.
Out:    the best plan found, its expected iteration, and a bound that no plan of the space beats.

A group of D devices runs S stages, M micro-batches; the rest of the world are data-parallel groups.
S = 1 is plain data parallelism, a plan like any other; so are several stages on one device
(`buckets`). Every (D, M, S, schedule) has a lower bound (`bounds`), and so has every cut inside it
(`best_first`): cuts are simulated in rounds, the most promising first, until the best simulated
iteration is within `Space.close` of all that is left.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan, Stage, default_groups, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning import buckets
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.directions import Directions, costs_of
from lightning_dpipe.planning.filling import least_frozen_us
from lightning_dpipe.planning.network import Network as Network
from lightning_dpipe.planning.pair_cuts import in_order
from lightning_dpipe.planning.pipelines import Aim, Chains, Pipeline, pipelines
from lightning_dpipe.planning.placement import best_of
from lightning_dpipe.planning.rounds import Config, Rounds
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import (
    SELF_CONDITIONING,
    expected_bound_us,
    expected_us,
    filler_of,
    variants_of,
    with_fills,
)

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_GROUP = 16
"""Devices of a group. Larger ones only make replications finer: groups with the same number of
replicas for all stages are several smaller groups."""

Progress = Callable[[int, float, float], None]
"""Called after each plan that was simulated with (plans tried, best iteration, bound), in us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from; None leaves a number free.

    `group_devices` are devices of one pipeline group, `probability` the share of self-conditioned
    steps. `max_plans` is how many plans may be tried, `max_idle` how many of them after the best
    one (None: any number), `max_nodes` how many prefixes of stages each
    configuration may look at in strict order (None: all, see `best_first`). A plan within `close`
    (relative) of what bounds all that is left ends the search; 0 is exact. With the `objective`
    "paper" each configuration has one cut, that of least T_max, and the best of those that are
    simulated is taken; the bound is still one on all plans. With a `network` the devices of
    pipelines are put on its nodes, in regular layouts, and the best plan's then by `mapping`; links
    are those that its pipelines see there. `max_shares` are the splits of rows tried for a stage on
    devices of several kinds (None: all). Of plans whose ends differ by less than `margin`
    (relative) the one of the fewest stages, then micro-batches, is taken: what times cannot tell
    apart is told apart by what can go wrong.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    group_devices: int | None = None
    schedules: tuple[str, ...] = ("1f1b",)
    fill: bool | str = True
    probability: float = SELF_CONDITIONING
    max_group: int = MAX_GROUP
    max_plans: int = 64
    max_idle: int | None = 20
    max_nodes: int | None = 512
    close: float = 1e-4
    objective: str = "simulated"
    network: Network | None = None
    max_shares: int | None = 4
    margin: float = 0.0


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
        configs = _configs(profile, space, world_size, batch_size, hidden=filler is not None)
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
    if space.network is not None and _places(profile):
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


def _configs(
    profile: Profile, space: Space, world_size: int, batch_size: int, *, hidden: bool
) -> Iterator[Config]:
    """Every combination of devices, micro-batches, stages and schedule that the space allows."""
    if profile.kinds:
        raise UnsupportedError(
            f"the profile has {1 + len(profile.others)} kinds of devices, this search takes them "
            "to be alike; use mixed.search_mixed, or make_plan"
        )
    frozen_us = least_frozen_us(FrozenCosts.of(profile, samples=batch_size))
    aim = Aim(
        probability=space.probability,
        frozen_us=frozen_us,
        hidden=hidden,
        shared=filler_of(space.fill) == "auto",
        max_nodes=space.max_nodes,
        objective=space.objective,
    )
    for num_devices in group_devices(space, world_size):
        batch = batch_size * num_devices
        placements = _placements(profile, space, world_size, num_devices)
        least = placements[0].costs
        if len(placements) > 1:
            least = costs_of(best_of([p.costs.profile for p in placements]))
        stages = _stage_choices(space, num_devices, least.num_layers)
        choices = itertools.product(microbatch_choices(space, batch), space.schedules)
        for num_microbatches, schedule in choices:
            plain = Cutting(
                sizes=split_sizes(batch, num_microbatches),
                num_devices=num_devices,
                num_groups=world_size // num_devices,
                schedule=schedule,
                memory_bytes=profile.memory_bytes,
            )
            if stages:
                yield from _pipelines(placements, least, plain, stages, aim)
            if num_devices == 1 and space.num_stages is None and schedule == space.schedules[0]:
                yield _buckets(placements[0], plain, space, frozen_us, hidden=hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Groups, and costs under links that no plan on them beats. `profile` has the links of any
    plan, where they do not depend on it."""

    costs: BackboneCosts | Directions
    groups: tuple[tuple[int, ...], ...] | None = None
    profile: Profile | None = None


def _places(profile: Profile) -> bool:
    """Whether devices are put on nodes: equal ones, of a model with one backbone."""
    return not profile.kinds and len(profile.graph.backbones) == 1


def _placements(
    profile: Profile, space: Space, world_size: int, num_devices: int
) -> list[_Placement]:
    """Where pipelines may be."""
    if space.network is None:
        return [_Placement(costs=costs_of(profile), profile=profile)]
    if not _places(profile):
        seen = space.network(profile, num_devices)
        return [_Placement(costs=costs_of(seen), profile=seen)]
    return [
        _Placement(costs=costs_of(space.network.least(profile, groups)), groups=groups)
        for groups in space.network.layouts(world_size, num_devices)
    ]


def _pipelines(
    placements: list[_Placement],
    least: BackboneCosts | Directions,
    cutting: Cutting,
    stages: list[int],
    aim: Aim,
) -> Iterator[Config]:
    """For each number of stages and placement.

    Bounds under the best links of all placements say which placements deserve their own.
    """

    def own_chains(
        own: Callable[[], list[Pipeline]], index: int, limit_us: Callable[[], float]
    ) -> Chains:
        yield from own()[index][1](limit_us)

    owns = [
        cache(lambda costs=p.costs: list(pipelines(costs, cutting, stages, aim)))
        for p in placements
    ]
    for index, (bound_us, of_any) in enumerate(pipelines(least, cutting, stages, aim)):
        for placement, own in zip(placements, owns, strict=True):
            alone = len(placements) == 1
            yield Config(
                groups=placement.groups,
                profile=placement.profile,
                cutting=cutting,
                bound_us=bound_us,
                chains=of_any if alone else partial(own_chains, own, index),
            )


def _buckets(
    placement: _Placement,
    cutting: Cutting,
    space: Space,
    frozen_us: int,
    *,
    hidden: bool,
) -> Config:
    """Several stages on one device."""
    costs = placement.costs
    bound_us = costs.profile.overhead_us + sum(
        share
        * buckets.least_us(
            costs,
            replace(cutting, self_conditioned=conditioned),
            frozen_us=frozen_us,
            hidden=hidden,
        )
        for conditioned, share in variants_of(costs.profile.graph, space.probability)
    )

    def chains(limit_us: Callable[[], float]) -> Chains:
        for stages in buckets.bucket_stages(costs) if bound_us < limit_us() else ():
            if buckets.fits(costs, cutting, stages):
                yield bound_us, stages

    return Config(
        groups=placement.groups,
        profile=placement.profile,
        cutting=cutting,
        bound_us=bound_us,
        chains=chains,
    )


def group_devices(space: Space, world_size: int) -> list[int]:
    """Devices of a pipeline group that the search tries."""
    if space.group_devices is not None:
        default_groups(world_size, space.group_devices)  # refuses what does not divide the world
        return [space.group_devices]
    return [d for d in range(1, min(world_size, space.max_group) + 1) if world_size % d == 0]


def _stage_choices(space: Space, num_devices: int, num_layers: int) -> list[int]:
    """One stage on several devices is the same as that many groups of one: once is enough."""
    again = num_devices > 1 and space.group_devices is None
    choices = range(2 if again else 1, min(num_devices, num_layers) + 1)
    return [s for s in choices if space.num_stages in (None, s)]


def microbatch_choices(space: Space, batch: int) -> list[int]:
    """Micro-batches that the search tries for a group's batch of so many samples."""
    if space.num_microbatches is not None:
        return [space.num_microbatches] if 1 <= space.num_microbatches <= batch else []
    return [m for m in MICROBATCHES if m <= batch]


def _nothing_fits(profile: Profile, space: Space, world_size: int, batch_size: int) -> str:
    memory = profile.memory_bytes
    limit = "" if memory is None else f" within {memory / 2**30:.1f} GiB a device"
    return (
        f"no plan for {world_size} ranks with {batch_size} samples each{limit} "
        f"(num_stages={space.num_stages}, num_microbatches={space.num_microbatches}); "
        "leave more of these to the planner, use more devices or a smaller batch"
    )

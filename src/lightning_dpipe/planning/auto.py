"""Search over stages, micro-batches, devices of a group, replicas, recomputation and schedule.

In:     a Profile, the world, the batch per device, and what the user fixed.
Out:    the best plan found, its expected iteration, and a bound that no plan of the space beats.

A group of D devices runs S stages, M micro-batches; the rest of the world are data-parallel groups.
S = 1 is plain data parallelism, a plan like any other. Every (D, M, S, schedule) has a lower bound
(`bounds`), and so has every cut inside it (`best_first`): cuts are simulated in rounds, the most
promising first, until the best simulated iteration is within `Space.close` of all that is left.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan, default_groups, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.best_first import Cut, Variant, cuts_by_bound, expected_us, stages_of
from lightning_dpipe.planning.bounds import ChainBounds
from lightning_dpipe.planning.filling import least_frozen_us
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import (
    SELF_CONDITIONING,
    expected_bound_us,
    filler_of,
    variants_of,
    with_fills,
)
from lightning_dpipe.planning.variants import expected_us as expected_plan_us

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_GROUP = 16
"""Devices of a group. Larger ones only make replications finer: groups with the same number of
replicas for all stages are several smaller groups."""

Progress = Callable[[int, float, float], None]
"""Called after each simulated plan with (plans simulated, best iteration, bound), in us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from; None leaves a number free.

    `group_devices` are devices of one pipeline group, `probability` the share of self-conditioned
    steps, `max_plans` how many plans may be simulated. A plan within `close` of the bound on all that
    is left (relative) ends the search; 0 is exact.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    group_devices: int | None = None
    schedules: tuple[str, ...] = ("1f1b",)
    fill: bool | str = True
    probability: float = SELF_CONDITIONING
    max_group: int = MAX_GROUP
    max_plans: int = 48
    close: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best plan, its expected iteration, the bound on all plans, and how many were tried."""

    plan: Plan
    expected_us: float
    bound_us: float
    num_plans: int


@dataclass(frozen=True, slots=True)
class _Config:
    """One (devices, micro-batches, stages, schedule), with the bounds of its cuts."""

    num_stages: int
    variants: tuple[Variant, ...]

    @property
    def cutting(self) -> Cutting:
        return self.variants[0][1].cutting


def search(
    profile: Profile,
    *,
    world_size: int,
    batch_size: int,
    space: Space | None = None,
    progress: Progress | None = None,
) -> Found:
    """Find the plan with the shortest expected iteration.

    Raises:
        PlanError: No plan fits the numbers, the model or the memory.
        UnsupportedError: The model has several backbones.
    """
    space = Space() if space is None else space
    costs = BackboneCosts(profile, only_backbone(profile))
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
    configs = _configs(costs, space, world_size, batch_size, hidden=filler is not None)
    queue = _Queue(configs)
    best: Plan | None = None
    best_us, tried = float("inf"), 0
    bound_us = queue.bound_us
    for config, cut in queue:
        if cut.bound_us * (1 + space.close) < best_us:
            plan = plan_of(base, config.cutting, cut, config.variants[0][1])
            if expected_bound_us(plan, profile, space.probability, filled=filler) < best_us:
                if filler is not None:
                    plan = with_fills(plan, profile, fill=filler)
                tried += 1
                plan_us = expected_plan_us(plan, profile, space.probability)
                if plan_us < best_us:
                    best, best_us = plan, plan_us
                if progress is not None:
                    progress(tried, best_us, min(queue.bound_us, best_us))
        bound_us = min(queue.bound_us, best_us)
        if best_us <= (1 + space.close) * queue.bound_us or tried >= space.max_plans:
            break
    if best is None:
        raise PlanError(_nothing_fits(profile, space, world_size, batch_size))
    return Found(plan=best, expected_us=best_us, bound_us=bound_us, num_plans=tried)


def plan_of(base: Plan, cutting: Cutting, cut: Cut, bounds: ChainBounds) -> Plan:
    """A cut as a plan without fills."""
    return replace(
        base,
        groups=default_groups(base.world_size, cutting.num_devices),
        stages=stages_of(bounds.costs.backbone, cut, bounds),
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


class _Queue:
    """Cuts of all configurations, in rounds: each round takes the next cut of every configuration
    that could still win, the least bound first."""

    def __init__(self, configs: Sequence[_Config]) -> None:
        ticket = count()
        self._heap: list[tuple[int, float, int, _Config, Iterator[Cut], Cut | None]] = []
        for config in configs:
            bound_us = expected_us(config.variants, config.num_stages)
            if bound_us < float("inf"):
                cuts = cuts_by_bound(config.variants, config.num_stages)
                self._heap.append((0, bound_us, next(ticket), config, cuts, None))
        heapq.heapify(self._heap)

    @property
    def bound_us(self) -> float:
        """No cut that is still to come ends the iteration earlier."""
        return min((entry[1] for entry in self._heap), default=float("inf"))

    def __iter__(self) -> Iterator[tuple[_Config, Cut]]:
        while self._heap:
            turn, _, ticket, config, cuts, ready = heapq.heappop(self._heap)
            if ready is None:
                ready = next(cuts, None)
                if ready is not None:
                    entry = (turn, ready.bound_us, ticket, config, cuts, ready)
                    heapq.heappush(self._heap, entry)
                continue
            following = next(cuts, None)
            if following is not None:
                entry = (turn + 1, following.bound_us, ticket, config, cuts, following)
                heapq.heappush(self._heap, entry)
            yield config, ready


def _configs(
    costs: BackboneCosts, space: Space, world_size: int, batch_size: int, *, hidden: bool
) -> list[_Config]:
    """Every combination of devices, micro-batches, stages and schedule that the space allows."""
    work = FrozenCosts.of(costs.profile, samples=batch_size, overhead_us=0)
    frozen_us = least_frozen_us(work)
    found = []
    for num_devices in _group_devices(space, world_size):
        batch = batch_size * num_devices
        stages = _stage_choices(space, num_devices, costs.num_layers)
        if not stages:
            continue
        for num_microbatches in _microbatch_choices(space, batch):
            for schedule in space.schedules:
                variants = tuple(
                    (
                        share,
                        ChainBounds(
                            costs,
                            Cutting(
                                sizes=split_sizes(batch, num_microbatches),
                                num_devices=num_devices,
                                num_groups=world_size // num_devices,
                                schedule=schedule,
                                self_conditioned=conditioned,
                                memory_bytes=costs.profile.memory_bytes,
                            ),
                            max_stages=stages[-1],
                            frozen_us=frozen_us,
                            hidden=hidden,
                        ),
                    )
                    for conditioned, share in variants_of(costs.profile.graph, space.probability)
                )
                found += [_Config(num_stages, variants) for num_stages in stages]
    return found


def _group_devices(space: Space, world_size: int) -> list[int]:
    if space.group_devices is not None:
        default_groups(world_size, space.group_devices)  # refuses what does not divide the world
        return [space.group_devices]
    return [d for d in range(1, min(world_size, space.max_group) + 1) if world_size % d == 0]


def _stage_choices(space: Space, num_devices: int, num_layers: int) -> list[int]:
    """One stage on several devices is the same as that many groups of one: once is enough."""
    again = num_devices > 1 and space.group_devices is None
    choices = range(2 if again else 1, min(num_devices, num_layers) + 1)
    return [s for s in choices if space.num_stages in (None, s)]


def _microbatch_choices(space: Space, batch: int) -> list[int]:
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

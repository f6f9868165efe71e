"""Search over which devices serve which stage where devices are of several kinds.

In:     a Profile of several kinds (`core.fleet`), the world and the batch per device.
Out:    the best plan found: which kinds serve each stage, in any order along the pipeline, and the
        shares by which they split rows.

The search is that of `auto`, its bounds those of `bounds`, taken over teams: a stage's number of
replicas becomes the index of a `Team`, a number of devices a code of how many are left of each
kind. Groups have equal devices, so that none waits for another. One stage on all devices, with
shares by speed, is data parallelism for unequal devices: it is in the space.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.fleet import groups_by_kind
from lightning_dpipe.core.plan import Plan, Stage, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.auto import Found, Progress, only_backbone, search
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.best_first import Cut, cuts_by_bound, expected_least_us
from lightning_dpipe.planning.mixed_bounds import MixedBounds
from lightning_dpipe.planning.pipelines import Chains
from lightning_dpipe.planning.rounds import Config
from lightning_dpipe.planning.space import Space, microbatch_choices
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.teams import RowCosts, teams_of
from lightning_dpipe.planning.variants import filler_of, variants_of

LARGE_GROUP = 8
"""Devices of a group beyond which groups are only looked at if no smaller ones are equal: teams are
many then, and several equal groups do nearly as well."""


def search_mixed(
    profile: Profile,
    *,
    world_size: int,
    batch_size: int,
    space: Space | None = None,
    progress: Progress | None = None,
) -> Found:
    """Find the plan with the shortest expected iteration on devices of several kinds.

    Raises:
        PlanError: No plan fits the numbers, the model or the memory, or the profile is of another
            world.
        UnsupportedError: The model has several backbones, or the objective is the paper's.
    """
    space = Space() if space is None else space
    if len(profile.kinds) != world_size:
        raise PlanError(
            f"the profile knows the devices of {len(profile.kinds)} ranks, the world has "
            f"{world_size}; profile the world that is planned for"
        )
    if space.objective != "simulated":
        raise UnsupportedError(
            f"objective={space.objective!r} for {1 + len(profile.others)} kinds of devices; their "
            "plans are compared by the simulated iteration: leave objective out"
        )
    configs = _configs(profile, space, batch_size)
    return search(
        profile, world_size=world_size, batch_size=batch_size, space=space, progress=progress,
        configs=configs,
    )  # fmt: skip


def _configs(profile: Profile, space: Space, batch_size: int) -> Iterator[Config]:
    """Every combination of devices, micro-batches, stages and schedule that the space allows."""
    backbone = only_backbone(profile)
    hidden = filler_of(space.fill) is not None
    kinds = range(1 + len(profile.others))
    world = [profile.kinds.count(kind) for kind in kinds]
    frozen_us = [FrozenCosts.of(profile.of_kind(k), samples=batch_size).least_us for k in kinds]
    for num_groups, only_one in _group_counts(world, space):
        counts = tuple(n // num_groups for n in world)
        num_devices = sum(counts)
        seen = profile if space.network is None else space.network(profile, num_devices)
        costs = [BackboneCosts(seen.of_kind(kind), backbone) for kind in kinds]
        most = 1 if only_one else min(num_devices, costs[0].num_layers)
        stages = [s for s in range(1, most + 1) if space.num_stages in (None, s)]
        limits = [p.memory_bytes for p in (c.profile for c in costs) if p.memory_bytes is not None]
        for num_microbatches, schedule in itertools.product(
            microbatch_choices(space, batch_size * num_devices), space.schedules
        ):
            cutting = Cutting(
                sizes=split_sizes(batch_size * num_devices, num_microbatches),
                num_devices=num_devices,
                num_groups=num_groups,
                schedule=schedule,
                memory_bytes=max(limits, default=None),
            )
            if stages:
                yield from _pipelines(
                    seen, costs, counts, cutting, stages, space, frozen_us, hidden=hidden
                )


def _group_counts(world: Sequence[int], space: Space) -> list[tuple[int, bool]]:
    """(number of equal groups, whether they are too large for anything but one stage)."""
    choices = [g for g in range(1, math.gcd(*world) + 1) if math.gcd(*world) % g == 0]
    if space.group_devices is not None:
        fits = [(g, False) for g in choices if sum(world) == g * space.group_devices]
        if not fits:
            raise PlanError(
                f"{sum(world)} ranks with {' + '.join(map(str, world))} devices of each kind "
                f"cannot form equal pipelines of {space.group_devices} devices; equal ones have "
                f"{', '.join(str(sum(world) // g) for g in choices)} devices"
            )
        return fits
    for most in (min(LARGE_GROUP, space.max_group), space.max_group):
        small = [(g, False) for g in choices if sum(world) // g <= most]
        if small:
            return small
    return [(choices[-1], True)]


def _pipelines(
    seen: Profile,
    costs: Sequence[BackboneCosts],
    counts: tuple[int, ...],
    cutting: Cutting,
    stages: list[int],
    space: Space,
    frozen_us: Sequence[int],
    *,
    hidden: bool,
) -> Iterator[Config]:
    """Chains of teams, for each number of stages."""
    cases = variants_of(seen.graph, space.probability)
    row_costs = _row_costs(costs, cutting, frozen_us, 1 + max(c for c, _ in cases))
    teams = teams_of(
        counts, cutting.sizes, row_costs, space.max_shares, everyone_only=stages == [1]
    )
    variants = tuple(
        (
            share,
            MixedBounds(
                costs,
                counts,
                teams,
                replace(cutting, self_conditioned=conditioned),
                max_stages=stages[-1],
                frozen_us=frozen_us,
                hidden=hidden,
            ),
        )
        for conditioned, share in cases
    )

    def chains(num_stages: int, limit_us: Callable[[], float]) -> Chains:
        for cut in cuts_by_bound(
            variants, num_stages, limit_us=limit_us, max_nodes=space.max_nodes
        ):
            yield cut.bound_us, _stages_of(cut, variants[0][1])

    for num_stages in stages:
        yield Config(
            profile=seen,
            cutting=cutting,
            bound_us=expected_least_us(variants, num_stages),
            chains=partial(chains, num_stages),
            plan=partial(_plan_of, counts, seen.kinds),
        )


def _row_costs(
    costs: Sequence[BackboneCosts], cutting: Cutting, frozen_us: Sequence[int], forwards: int
) -> RowCosts:
    def work_us(kind: BackboneCosts, rows: int) -> int:
        span = (kind.backbone, 0, kind.num_layers, rows)
        once = forwards * kind.profile.forward_us(*span) + kind.profile.backward_us(*span)
        return cutting.num_microbatches * once

    rows = range(cutting.sizes[0] + 1)
    return RowCosts(
        work_us=tuple(tuple(work_us(kind, r) for r in rows) for kind in costs),
        frozen_us=tuple(frozen_us),
    )


def _stages_of(cut: Cut, bounds: MixedBounds) -> tuple[Stage, ...]:
    """The cut as stages of a plan; devices are numbered kind by kind."""
    free = [
        iter(range(sum(bounds.counts[:k]), sum(bounds.counts))) for k in range(len(bounds.counts))
    ]
    stages = []
    for i, part in enumerate(cut.parts):
        team = bounds.teams[part.replicas]
        table = bounds.table(part.replicas, len(cut.parts) - i)
        stages.append(
            Stage(
                backbone=bounds.kinds[0].backbone,
                start=part.start,
                stop=part.stop,
                devices=tuple(next(free[kind]) for kind in team.kinds),
                recompute=bool(table.recompute[part.start, part.stop]),
                shares=team.shares,
            )
        )
    return tuple(stages)


def _plan_of(
    counts: Sequence[int],
    kinds: Sequence[int],
    base: Plan,
    cutting: Cutting,
    stages: tuple[Stage, ...],
) -> Plan:
    """A chain as a plan without fills: devices in the order of the stages, ranks by kind."""
    kind_at = [kind for kind, n in enumerate(counts) for _ in range(n)]
    order = [device for stage in stages for device in stage.devices]
    place = {device: i for i, device in enumerate(order)}
    return replace(
        base,
        groups=groups_by_kind([kind_at[device] for device in order], kinds),
        stages=tuple(replace(s, devices=tuple(place[d] for d in s.devices)) for s in stages),
        num_microbatches=cutting.num_microbatches,
        schedule=cutting.schedule,
    )

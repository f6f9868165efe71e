"""All ways to cut the batch and the backbones that a search looks at, each with a lower bound.

In:     a Profile, a `Space`, the world and the batch per device.
Out:    `Config`: micro-batches, devices, a bound, and a generator of promising stages.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning import buckets
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.bounds import least_work_us
from lightning_dpipe.planning.directions import Directions, backbones_of, costs_of
from lightning_dpipe.planning.pipelines import Aim, Chains, Pipeline, pipelines
from lightning_dpipe.planning.placement import best_of
from lightning_dpipe.planning.rounds import Config
from lightning_dpipe.planning.space import Space, group_devices, microbatch_choices, stage_choices
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import filler_of, variants_of


def configs_of(
    profile: Profile,
    space: Space,
    world_size: int,
    batch_size: int,
    limit_us: Callable[[], float],
) -> Iterator[Config]:
    """Every combination of devices, micro-batches, stages and schedule that the space allows, but
    those whose work alone takes as long as a limit that may fall."""
    if profile.kinds:
        raise UnsupportedError(
            f"the profile has {1 + len(profile.others)} kinds of devices, this search takes them "
            "to be alike; use mixed.search_mixed, or make_plan"
        )
    filler = filler_of(space.fill)
    aim = Aim(
        probability=space.probability,
        frozen_us=FrozenCosts.of(profile, samples=batch_size).least_us,
        hidden=filler is not None,
        shared=filler == "auto",
        max_nodes=space.max_nodes,
        objective=space.objective,
    )
    for num_devices in group_devices(space, world_size):
        batch = batch_size * num_devices
        placements = _placements(profile, space, world_size, num_devices)
        least = placements[0].costs
        if len(placements) > 1:
            least = costs_of(best_of([p.costs.profile for p in placements]))
        stages = stage_choices(space, num_devices, least.num_layers)
        choices = itertools.product(microbatch_choices(space, batch), space.schedules)
        for num_microbatches, schedule in choices:
            plain = Cutting(
                sizes=split_sizes(batch, num_microbatches),
                num_devices=num_devices,
                num_groups=world_size // num_devices,
                schedule=schedule,
                memory_bytes=profile.memory_bytes,
            )
            if stages and _work_us(least, plain, aim) < limit_us():
                yield from _pipelines(placements, least, plain, stages, aim)
            if num_devices == 1 and space.num_stages is None and schedule == space.schedules[0]:
                yield _buckets(placements[0], plain, aim)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Groups, and costs under links that no plan on them beats. `profile` has the links of any
    plan, where they do not depend on it."""

    costs: BackboneCosts | Directions
    groups: tuple[tuple[int, ...], ...] | None = None
    profile: Profile | None = None


def places(profile: Profile) -> bool:
    """Whether devices are put on nodes: equal ones, of a model with one backbone."""
    return not profile.kinds and len(profile.graph.backbones) == 1


def _placements(
    profile: Profile, space: Space, world_size: int, num_devices: int
) -> list[_Placement]:
    """Where pipelines may be."""
    if space.network is None:
        return [_Placement(costs=costs_of(profile), profile=profile)]
    if not places(profile):
        seen = space.network(profile, num_devices)
        return [_Placement(costs=costs_of(seen), profile=seen)]
    return [
        _Placement(costs=costs_of(space.network.least(profile, groups)), groups=groups)
        for groups in space.network.layouts(world_size, num_devices)
    ]


def _work_us(costs: BackboneCosts | Directions, cutting: Cutting, aim: Aim) -> float:
    """Least time that each of a group's devices works, if it never waits."""
    ops_us = sum(
        share * least_work_us(c, of(replace(cutting, self_conditioned=conditioned)))
        for conditioned, share in variants_of(costs.profile.graph, aim.probability)
        for c, of in backbones_of(costs)
    )
    return ops_us + aim.frozen_us + costs.profile.overhead_us


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


def _buckets(placement: _Placement, cutting: Cutting, aim: Aim) -> Config:
    """Several stages on one device."""
    costs = placement.costs
    bound_us = costs.profile.overhead_us + sum(
        share
        * buckets.least_us(
            costs,
            replace(cutting, self_conditioned=conditioned),
            frozen_us=aim.frozen_us,
            hidden=aim.hidden,
        )
        for conditioned, share in variants_of(costs.profile.graph, aim.probability)
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

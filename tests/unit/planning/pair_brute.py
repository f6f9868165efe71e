"""Every way to pipe several backbones in two directions: the oracle of the pair tests."""

import itertools
import random
from collections.abc import Iterator, Sequence

from brute import random_profile

from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.directions import Directions
from lightning_dpipe.planning.pair_cuts import Position, in_order, pair_stages
from synthetic import pair_profile


def random_pair(
    rng: random.Random, *num_layers: int, frozen: bool = False, feedback: bool = False
) -> Profile:
    """Uneven backbones of so many layers; the first one may feed back."""
    return pair_profile(
        *(
            random_profile(rng, n, frozen=frozen and k == 0, feedback=feedback and k == 0)
            for k, n in enumerate(num_layers)
        )
    )


def all_positions(
    num_down: int, num_up: int, num_positions: int, num_devices: int
) -> Iterator[tuple[Position, ...]]:
    """All cuts of both directions and all replications, on all devices."""
    for down, up, devices in itertools.product(
        _ranges(num_down, num_positions),
        _ranges(num_up, num_positions),
        _ranges(num_devices, num_positions),
    ):
        yield tuple(
            Position(d, u, high - low)
            for d, u, (low, high) in zip(down, reversed(up), devices, strict=True)
        )


def pair_plan(
    profile: Profile,
    directions: Directions,
    positions: Sequence[Position],
    *,
    num_groups: int,
    batch_size: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    stages: tuple[Stage, ...] | None = None,
) -> Plan:
    """A plan without fills."""
    num_devices = sum(position.replicas for position in positions)
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=default_groups(num_groups * num_devices, num_devices),
        stages=pair_stages(profile, directions, positions) if stages is None else stages,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        schedule=schedule,
    )
    return in_order(plan, profile)


def _ranges(total: int, parts: int) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple(itertools.pairwise((0, *inner, total)))
        for inner in itertools.combinations(range(1, total), parts - 1)
    ]

"""One profile for a world of several kinds of devices, and who in a plan is of which kind.

In:     a Profile per kind, and the kind of every rank. Out: a Profile that holds them all, and the
Profile of each device of a plan's groups.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_dpipe.core.errors import PlanError, ProfileError
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import DeviceCosts, Profile


def fleet(profiles: Sequence[Profile], kinds: Sequence[int]) -> Profile:
    """The profile of a world in which rank r is a device of ``profiles[kinds[r]]``.

    Links are those of the first profile, the overhead is the largest: all ranks end together.

    Raises:
        ProfileError: The profiles are of different models or precisions, or a kind has no rank.
    """
    if sorted(set(kinds)) != list(range(len(profiles))):
        raise ProfileError(
            f"kinds {tuple(kinds)} for {len(profiles)} profiles; name for every rank which of them "
            "it is, and leave out profiles that no rank is of"
        )
    first = profiles[0]
    for other in profiles[1:]:
        if other.graph != first.graph or other.dtype != first.dtype:
            raise ProfileError(
                f"the profiles of {first.device!r} ({first.dtype}) and {other.device!r} "
                f"({other.dtype}) are of different models or precisions; profile one model on both"
            )
    if len(profiles) == 1:
        return first
    return replace(
        first,
        overhead_us=max(p.overhead_us for p in profiles),
        estimated=any(p.estimated for p in profiles),
        others=tuple(
            DeviceCosts(
                device=p.device, costs=p.costs, memory_bytes=p.memory_bytes, fill_us=p.fill_us
            )
            for p in profiles[1:]
        ),
        kinds=tuple(kinds),
    )


def kinds_of(
    names: Sequence[str], times_us: Sequence[Sequence[int]], tolerance: float | None
) -> tuple[int, ...]:
    """Number the kinds of a world's devices, in the order of their first ranks.

    Args:
        names: Of every rank's device; devices of different names are of different kinds.
        times_us: Of every rank: how long the same pieces of work take.
        tolerance: Devices of one name are of one kind if none of their times differ by more than
            this share of the first one's; None: always, whatever noise has measured.
    """
    firsts: list[int] = []
    kinds = []
    for rank, name in enumerate(names):

        def alike(first: int, rank: int = rank, name: str = name) -> bool:
            pairs = zip(times_us[first], times_us[rank], strict=True)
            return names[first] == name and (
                tolerance is None or all(abs(b - a) <= tolerance * a for a, b in pairs)
            )

        kind = next((k for k, first in enumerate(firsts) if alike(first)), len(firsts))
        if kind == len(firsts):
            firsts.append(rank)
        kinds.append(kind)
    return tuple(kinds)


def kinds_in_groups(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """Per device of a pipeline group: its kind, the same in every group.

    Raises:
        PlanError: The profile is of another world, or groups are of unequal speed.
    """
    if not profile.kinds:
        return (0,) * plan.num_devices
    if len(profile.kinds) != plan.world_size:
        raise PlanError(
            f"the profile knows the devices of {len(profile.kinds)} ranks, the plan has "
            f"{plan.world_size}; profile the world that is planned for"
        )
    by_group = [tuple(profile.kinds[rank] for rank in ranks) for ranks in plan.groups]
    for index, kinds in enumerate(by_group):
        if kinds != by_group[0]:
            raise PlanError(
                f"pipeline group {index} has devices of kinds {kinds}, group 0 of {by_group[0]}: "
                "one would wait for the other; give every group the same kinds, or use one group"
            )
    return by_group[0]


def device_profiles(plan: Plan, profile: Profile) -> tuple[Profile, ...]:
    """Per device of a pipeline group: the profile of its kind.

    Raises:
        PlanError: As `kinds_in_groups`.
    """
    return tuple(profile.of_kind(kind) for kind in kinds_in_groups(plan, profile))


def groups_by_kind(order: Sequence[int], kinds: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Equal pipeline groups of a world of several kinds of devices.

    Of each kind, consecutive ranks form a group, the lowest one last in the pipeline.

    Args:
        order: The kind of each device of a group.
        kinds: The kind of every rank.

    Raises:
        PlanError: The world is not so many groups of these devices.
    """
    num_groups = len(kinds) // len(order)
    if sorted(kinds) != sorted(list(order) * num_groups):
        raise PlanError(
            f"ranks of kinds {tuple(kinds)} cannot form groups of kinds {tuple(order)}; "
            "every group needs the same number of each kind"
        )
    places = {kind: [d for d, k in enumerate(order) if k == kind] for kind in set(order)}
    groups = [[0] * len(order) for _ in range(num_groups)]
    for kind, devices in places.items():
        ranks = [rank for rank, k in enumerate(kinds) if k == kind]
        for group in range(num_groups):
            mine = ranks[group * len(devices) : (group + 1) * len(devices)]
            for device, rank in zip(devices, reversed(mine), strict=True):
                groups[group][device] = rank
    return tuple(map(tuple, groups))

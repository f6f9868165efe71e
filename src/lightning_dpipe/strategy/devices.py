"""Which ranks have devices of which kind, and the one profile of them all.

In:     every rank's own profile. Out: on all ranks the same profile, of one kind or of several.

By default devices are of one kind if they have one name: two equal devices never become two kinds
by the noise of a measurement. ``device_kinds="time"`` also tells devices of one name apart, by what
they measured (a throttled card, a host that others use too).
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.fleet import fleet, kinds_of
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.profiling.store import default_cache_dir, device_name
from lightning_dpipe.strategy.collectives import HostLink

log = logging.getLogger(__name__)

DEVICE_KINDS = ("name", "time")
TOLERANCE = 0.15
"""Devices of one name are told apart by times that differ by more than this share."""


def check_device_kinds(device_kinds: str) -> None:
    """Refuse an unknown way to tell devices apart.

    Raises:
        PlanError: It is unknown.
    """
    if device_kinds not in DEVICE_KINDS:
        raise PlanError(
            f"device_kinds={device_kinds!r}; choose one of: {', '.join(map(repr, DEVICE_KINDS))}"
        )


def devices_differ(device: torch.device, device_kinds: str, link: HostLink) -> bool:
    """Whether the world may turn out to be of several kinds. Collective."""
    return device_kinds == "time" or len(set(link.gather_objects(device_name(device)))) > 1


def own_cache(device_kinds: str, link: HostLink) -> Path | None:
    """Where a rank keeps its profile: by name all ranks share one, by time each has its own."""
    if device_kinds == "name":
        return None
    return default_cache_dir() / f"rank-{link.rank}-of-{link.world_size}"


def widened(samples: Mapping[str, Sequence[int]], batch_size: int) -> dict[str, tuple[int, ...]]:
    """Sizes to measure where shares are free: powers of two up to the local batch as well."""
    powers = {min(2**i, batch_size) for i in range(batch_size.bit_length() + 1)}
    return {name: tuple(sorted(powers.union(sizes))) for name, sizes in samples.items()}


def world_profile(profile: Profile, device_kinds: str, link: HostLink) -> Profile:
    """The profile of all kinds of devices, the same on every rank. Collective.

    Args:
        profile: What this rank measured.
        device_kinds: ``"name"`` or ``"time"``.
        link: To the other ranks.
    """
    tolerance = TOLERANCE if device_kinds == "time" else None
    told = link.gather_objects((profile.device, _times_us(profile)))
    kinds = kinds_of([name for name, _ in told], [times for _, times in told], tolerance)
    if max(kinds) == 0:
        return profile
    first = link.rank == kinds.index(kinds[link.rank])
    every = link.gather_objects(to_data(profile) if first else None)
    profiles = [from_data(Profile, data) for data in every if data is not None]
    if link.rank == 0:
        for kind, known in enumerate(profiles):
            ranks = [rank for rank, k in enumerate(kinds) if k == kind]
            log.info("devices of kind %d: %s, ranks %s", kind, known.device, ranks)
    return fleet(profiles, kinds)


def _times_us(profile: Profile) -> tuple[int, ...]:
    """Forward plus backward of every component at its largest size."""
    return tuple(
        profile.forward_us(*span) + profile.backward_us(*span)
        for cost in profile.costs
        for span in [(cost.name, 0, len(cost.layers), cost.samples[-1])]
    )

"""Where a plan comes from, in words, so that a plan that does not fit can say what differs.

Digests tell that two things differ, an Origin tells in what. It takes no part in planning.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a plan was made of: number of layers by component, and the profile's head."""

    layers: tuple[tuple[str, int], ...]
    device: str
    dtype: str
    versions: tuple[tuple[str, str], ...] = ()
    estimated: bool = False


def origin_of(profile: Profile) -> Origin:
    """The origin of plans that are made from `profile`."""
    return Origin(
        layers=layer_counts(profile.graph),
        device=profile.device,
        dtype=profile.dtype,
        versions=tuple(sorted(profile.versions.items())),
        estimated=profile.estimated,
    )


def layer_counts(graph: ModelGraph) -> tuple[tuple[str, int], ...]:
    """(component, layers), in run order."""
    return tuple((c.name, len(c.layers)) for c in graph.components)


def layer_differences(there: Mapping[str, int], here: Mapping[str, int]) -> tuple[str, str]:
    """What either side has that the other has not: "61 layers in unet", "63 in unet"."""
    names = [n for n in (*there, *here) if there.get(n) != here.get(n)]
    names = list(dict.fromkeys(names))
    return _layers(there, names), _layers(here, names)


def _layers(counts: Mapping[str, int], names: list[str]) -> str:
    return ", ".join(
        f"{counts[n]} layer{'s' * (counts[n] != 1)} in {n}" if n in counts else f"no {n}"
        for n in names
    )


def head_differences(there: Origin, device: str, dtype: str, versions: Mapping[str, str]) -> str:
    """Device, dtype and versions that are not the same, both values each; empty if all are."""
    pairs = [("device", there.device, device), ("dtype", there.dtype, dtype)]
    known = dict(there.versions)
    pairs += [(n, known.get(n, "absent"), versions.get(n, "absent")) for n in {**known, **versions}]
    return "; ".join(f"{name} {a} there, {b} here" for name, a, b in pairs if a != b)

"""The links that the devices of a pipeline see once it is known on which nodes they are.

In:     what `planning/placement` worked out. Out: a Profile that the simulator, the filler and the
bounds read like any other.

Gradients are summed in legs: inside each node, then over nodes. One leg over n participants is a
ring reduction, 2(n-1)/n of the bytes over its link.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lightning_dpipe.core.profile import Legs, Link, Profile


@dataclass(frozen=True, kw_only=True)
class Links:
    """`edges[a, b]`: from device a to device b of a pipeline; `stages[s]`: legs of a stage.

    `replicas[n]` are the legs of any stage with n replicas in all, for bounds on plans whose
    stages are not known yet.
    """

    edges: Mapping[tuple[int, int], Link]
    stages: tuple[Legs, ...] = ()
    replicas: Mapping[int, Legs]


@dataclass(frozen=True, kw_only=True)
class PlacedProfile(Profile):
    """A profile whose links depend on who sends to whom."""

    links: Links

    def link(self, source: int, target: int) -> Link:
        """The link between two devices of a pipeline."""
        return self.links.edges.get((source, target), self.p2p)

    def legs(self, replicas: int, stage: int | None = None) -> Legs:
        """Legs of a gradient reduction."""
        if stage is not None and stage < len(self.links.stages):
            return self.links.stages[stage]
        return self.links.replicas.get(replicas) or super().legs(replicas)


def placed_profile(profile: Profile, links: Links, *, p2p: Link | None = None) -> PlacedProfile:
    """`profile` with these links; `p2p` is taken where nobody knows the devices."""
    kept = {f.name: getattr(profile, f.name) for f in fields(Profile)}
    return PlacedProfile(**(kept | ({} if p2p is None else {"p2p": p2p})), links=links)

"""Fills of a step whose batch and next batch are of different shape classes, or encoded already.

In:     the plan of the base class and a Profile of each class.
Out:    fills for the pair, made by the same planner. The stage cuts stay those of the plan.
"""

from dataclasses import replace

from lightning_dpipe.core.buckets import pair_graph
from lightning_dpipe.core.caching import CacheCut
from lightning_dpipe.core.graph import ComponentKind
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import ComponentCost, Profile
from lightning_dpipe.planning.variants import with_fills


def pair_profile(this: Profile, following: Profile) -> Profile:
    """What a steady step costs: backbones on `this` class, frozen components on the `following`."""
    ahead = {c.name for c in this.graph.components if c.kind is ComponentKind.FROZEN}
    costs = tuple(
        following.component(cost.name) if cost.name in ahead else cost for cost in this.costs
    )
    return replace(this, graph=pair_graph(this.graph, following.graph), costs=costs)


def pair_fills(plan: Plan, this: Profile, following: Profile) -> tuple[Fill, ...]:
    """The fills of a pair; deterministic, so ranks with the same profiles make the same ones."""
    return with_fills(plan, pair_profile(this, following)).fills


def cached_profile(profile: Profile, cut: CacheCut) -> Profile:
    """What a step costs when all that may be kept of the next batch's encodings is at hand."""

    def idle(costs: tuple[ComponentCost, ...]) -> tuple[ComponentCost, ...]:
        return tuple(
            replace(
                cost,
                layers=tuple(
                    replace(layer, forward_us=(0,) * len(layer.forward_us))
                    if (cost.name, i) in cut.idle
                    else layer
                    for i, layer in enumerate(cost.layers)
                ),
            )
            for cost in costs
        )

    return replace(
        profile,
        graph=cut.graph(profile.graph),
        costs=idle(profile.costs),
        others=tuple(replace(other, costs=idle(other.costs)) for other in profile.others),
    )


def cached_fills(plan: Plan, this: Profile, following: Profile, cut: CacheCut) -> tuple[Fill, ...]:
    """The fills of a step whose next batch's kept encodings are at hand; no samples move."""
    profile = cached_profile(pair_profile(this, following), cut)
    return with_fills(plan, profile, fill="at_home").fills

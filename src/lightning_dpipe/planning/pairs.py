"""Fills of a step whose batch and next batch are of different shape classes.

In:     the plan of the base class and a Profile of each class.
Out:    fills for the pair, made by the same planner. The stage cuts stay those of the plan.
"""

from dataclasses import replace

from lightning_dpipe.core.buckets import pair_graph
from lightning_dpipe.core.graph import ComponentKind
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
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

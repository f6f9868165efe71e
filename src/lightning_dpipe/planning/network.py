"""What a search asks about a cluster: where pipelines may be, and the links they see there.

In:     a Cluster. Out: the `Network` that `auto.Space` takes.
"""

from dataclasses import dataclass, replace

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.plan import Plan, default_groups
from lightning_dpipe.core.profile import Legs, Link, Profile
from lightning_dpipe.planning import placement
from lightning_dpipe.planning.mapping import place
from lightning_dpipe.planning.variants import SELF_CONDITIONING, expected_us, with_fills

EXACT_WORLD = 16
"""Ranks up to which a search looks beyond regular layouts; it cannot get through on larger ones."""

SEARCHED_PARTS = 64
"""Parts of assignments that a search looks at: a second or two with many micro-batches."""


@dataclass(frozen=True, slots=True)
class Network:
    """Ranks on the nodes of `cluster`, numbered node by node."""

    cluster: Cluster

    def __call__(self, profile: Profile, num_devices: int) -> Profile:
        """A plain profile for pipelines of `num_devices` on consecutive ranks of all nodes.

        Its ring takes as long as the legs of stages that have one device in each pipeline.
        """
        groups = default_groups(self.cluster.world_size, num_devices)
        least = placement.least(profile, groups, self.cluster)
        ring = one_ring(least.legs(len(groups)), len(groups))
        return replace(profile, p2p=least.p2p, allreduce=ring, links=None)

    def layouts(self, world_size: int, num_devices: int) -> tuple[placement.Groups, ...]:
        """Groups to choose from, consecutive ranks first.

        Raises:
            PlanError: The cluster has too few devices.
        """
        placement.check_world(world_size, self.cluster)
        return placement.layouts(world_size, num_devices, self.cluster)

    def least(self, profile: Profile, groups: placement.Groups) -> Profile:
        """The profile with links that no plan on `groups` beats."""
        return placement.least(profile, groups, self.cluster)

    def placed(self, profile: Profile, plan: Plan) -> Profile:
        """The profile with the links that the plan's pipelines see."""
        return placement.placed(profile, plan, self.cluster)

    def place(
        self,
        plan: Plan,
        profile: Profile,
        *,
        filler: str | None,
        probability: float = SELF_CONDITIONING,
    ) -> tuple[Plan, float]:
        """The plan on its best nodes, with fills for them, and its expected iteration.

        The regular layouts and what `mapping` finds for the plan's own fills are filled anew and
        compared; among equals the first stays: the plan's own groups.
        """
        parts = SEARCHED_PARTS if plan.world_size <= EXACT_WORLD else 0
        found = place(
            plan, profile, self.cluster, probability=probability, max_parts=parts
        ).plan.groups
        others = self.layouts(plan.world_size, plan.num_devices)
        choices: list[Plan] = []
        for groups in dict.fromkeys((plan.groups, *others, found)):
            at = replace(plan, groups=groups)
            if filler is not None and (groups != plan.groups or not plan.fills):
                at = with_fills(at, self.placed(profile, at), fill=filler)
            choices.append(at)
        timed = [
            (expected_us(at, self.placed(profile, at), probability), i)
            for i, at in enumerate(choices)
        ]
        best_us, index = min(timed)
        return choices[index], best_us


def one_ring(legs: Legs, replicas: int) -> Link:
    """The link over which a single ring of all replicas takes as long as the legs do."""
    busy = [(2 * (n - 1) / n, link) for n, link in legs if n > 1]
    if not busy:
        return legs[0][1]
    seconds_a_byte = sum(share / link.bytes_per_s for share, link in busy)
    return Link(
        latency_us=sum(link.latency_us for _, link in busy),
        bytes_per_s=max(1, round(2 * (replicas - 1) / replicas / seconds_a_byte)),
        host_us=sum(link.host_us for _, link in busy),
    )


def network_of(cluster: Cluster) -> Network:
    """The network of a cluster."""
    return Network(cluster)

"""What a search asks about a cluster: where pipelines may be, and the links they see there.

In:     a Cluster. Out: the `Network` that `auto.Space` takes.
"""

from dataclasses import dataclass

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning import placement
from lightning_dpipe.planning.mapping import Mapped, place


@dataclass(frozen=True, slots=True)
class Network:
    """Ranks on the nodes of `cluster`, numbered node by node."""

    cluster: Cluster

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

    def place(self, plan: Plan, profile: Profile, probability: float) -> Mapped:
        """The plan on its best nodes."""
        return place(plan, profile, self.cluster, probability=probability)


def network_of(cluster: Cluster) -> Network:
    """The network of a cluster."""
    return Network(cluster)

"""What a search asks about a cluster: where pipelines may be, and the links they see there.

In:     a Cluster. Out: the `Network` that `auto.Space` takes.
"""

from dataclasses import dataclass, replace

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning import placement
from lightning_dpipe.planning.mapping import place
from lightning_dpipe.planning.variants import SELF_CONDITIONING, expected_us, with_fills


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
        found = place(plan, profile, self.cluster, probability=probability).plan.groups
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


def network_of(cluster: Cluster) -> Network:
    """The network of a cluster."""
    return Network(cluster)

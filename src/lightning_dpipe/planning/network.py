"""Which links the pipelines of a plan see on a cluster, by the number of their devices.

In:     a Cluster. Out: the `Network` that a search takes.

Ranks are numbered node by node and pipelines are consecutive ranks, so a pipeline that fits into a
node stays in it. The devices of a node then reduce different stages at about the same time, and
their rings share the node's network card: stages inside a node do not cut the bytes on it. Taken
for every pipeline as if its stages had one device each, the most rings there can be.
"""

from dataclasses import replace

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.auto import Network


def network_of(cluster: Cluster) -> Network:
    """Links of a profile on `cluster`, for pipelines of a number of devices."""

    def seen(profile: Profile, num_devices: int) -> Profile:
        inside = num_devices <= cluster.devices_per_node
        rings = min(num_devices, cluster.devices_per_node)
        return replace(
            profile,
            p2p=cluster.inside if inside else cluster.between,
            allreduce=cluster.ring(cluster.nodes, side_by_side=rings),
        )

    return seen

"""A small made-up cluster."""

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.profile import Link

INSIDE = Link(latency_us=5, bytes_per_s=10**11)
BETWEEN = Link(latency_us=50, bytes_per_s=10**9)


def cluster_of(nodes: int, devices_per_node: int = 4, *, nic: int = 4 * 10**9) -> Cluster:
    device = Device(
        name="chip",
        flops_per_s={"float32": 10**12},
        memory_bytes=10**9,
        memory_bytes_per_s=10**12,
        max_efficiency=0.5,
        half_efficiency_flops=0,
        memory_efficiency=0.8,
        launch_us=5,
    )
    return Cluster(
        name="test",
        nodes=nodes,
        devices_per_node=devices_per_node,
        device=device,
        inside=INSIDE,
        between=BETWEEN,
        nic_bytes_per_s=nic,
    )

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.profile import Link
from lightning_dpipe.planning.auto import Space, search
from lightning_dpipe.planning.network import network_of
from lightning_dpipe.planning.variants import expected_us
from synthetic import FrozenChain, model_profile

INSIDE = Link(latency_us=5, bytes_per_s=10**11)
BETWEEN = Link(latency_us=50, bytes_per_s=10**9)


def cluster(nodes: int) -> Cluster:
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
        devices_per_node=4,
        device=device,
        inside=INSIDE,
        between=BETWEEN,
        nic_bytes_per_s=4 * 10**9,
    )


def test_rings_of_pipelines_inside_nodes_share_the_network_card() -> None:
    profile = model_profile([1] * 4)
    seen = network_of(cluster(2))
    assert [seen(profile, d).allreduce.bytes_per_s for d in (1, 2, 4, 8)] == [
        4 * 10**9,
        2 * 10**9,
        10**9,
        10**9,
    ]
    assert [seen(profile, d).p2p for d in (1, 4, 8)] == [INSIDE, INSIDE, BETWEEN]


def test_in_one_node_every_ring_has_the_inner_links() -> None:
    profile = model_profile([1] * 4)
    assert network_of(cluster(1))(profile, 4).allreduce == INSIDE


def test_a_search_prices_the_shared_card() -> None:
    frozen = (FrozenChain(name="vae", forward_us=(10,)),)
    profile = model_profile([100] * 4, frozen=frozen, trained_bytes=10**7, width=0)
    alone = network_of(cluster(2))(profile, 1)  # as if each stage had the card to itself
    network = network_of(cluster(2))
    options = {"world_size": 8, "batch_size": 8}
    shared = search(profile, space=Space(network=network), **options)
    bare = search(alone, **options)
    assert shared.expected_us > bare.expected_us
    seen = network(profile, shared.plan.num_devices)
    assert shared.expected_us == expected_us(shared.plan, seen)

import pytest

from lightning_dpipe.core.profile import Profile, reduce_us
from lightning_dpipe.planning.auto import Space, search
from lightning_dpipe.planning.network import network_of
from lightning_dpipe.planning.placement import layouts
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import expected_us
from synthetic import FrozenChain, model_profile
from unit.planning.clusters import cluster_of

FROZEN = (FrozenChain(name="vae", forward_us=(10,)),)


def test_a_search_prices_the_shared_card() -> None:
    profile = model_profile([100] * 4, frozen=FROZEN, trained_bytes=10**7, width=0)
    network = network_of(cluster_of(2))
    options = {"world_size": 8, "batch_size": 8}
    shared = search(profile, space=Space(network=network), **options)
    bare = search(profile, **options)
    assert shared.expected_us > bare.expected_us
    assert shared.expected_us == expected_us(shared.plan, network.placed(profile, shared.plan))
    assert shared.bound_us <= shared.expected_us


def test_a_search_puts_stages_on_nodes_of_their_own_where_that_is_faster() -> None:
    profile = model_profile([100] * 4, frozen=FROZEN, trained_bytes=10**7, width=1)
    network = network_of(cluster_of(2))
    space = Space(network=network, group_devices=2, num_stages=2)
    found = search(profile, world_size=8, batch_size=8, space=space)
    assert found.plan.groups == layouts(8, 2, network.cluster)[1]
    for groups in layouts(8, 2, network.cluster):
        fixed = network.least(profile, groups)
        alone = search(
            fixed, world_size=8, batch_size=8, space=Space(num_stages=2, group_devices=2)
        )
        assert found.expected_us <= alone.expected_us


def test_a_plan_of_fixed_stages_is_mapped_and_filled_under_its_links() -> None:
    profile = model_profile([100] * 4, frozen=FROZEN, trained_bytes=10**7, width=1)
    network = network_of(cluster_of(2))
    plan = make_plan(profile, world_size=8, batch_size=8, num_stages=2, network=network)
    kept = make_plan(profile, world_size=8, batch_size=8, num_stages=2)
    assert plan.stages == kept.stages
    assert plan.groups == layouts(8, 2, network.cluster)[1]
    placed_us, kept_us = (expected_us(p, network.placed(profile, p)) for p in (plan, kept))
    assert placed_us < kept_us


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16])
def test_one_ring_takes_as_long_as_the_legs(num_devices: int) -> None:
    profile = model_profile([100] * 16, frozen=FROZEN, trained_bytes=10**8)
    network = network_of(cluster_of(4))
    plan = make_plan(profile, world_size=16, batch_size=16, num_stages=num_devices)
    plain, seen = network(profile, num_devices), network.placed(profile, plan)
    replicas = len(plan.groups)
    took_us = reduce_us(10**9, plain.legs(replicas))
    assert type(plain) is Profile
    assert took_us == pytest.approx(reduce_us(10**9, seen.legs(replicas, 0)), rel=1e-6, abs=1)
    assert plain.p2p == (
        cluster_of(4).inside if num_devices <= 4 else network.least(profile, plan.groups).p2p
    )


def test_in_one_node_nothing_moves() -> None:
    profile = model_profile([100] * 4, frozen=FROZEN)
    options = {"world_size": 4, "batch_size": 8, "num_stages": 2}
    network = network_of(cluster_of(1))
    assert make_plan(profile, network=network, **options).groups == ((1, 0), (3, 2))

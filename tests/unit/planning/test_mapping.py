"""The mapping search against every assignment of devices to nodes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.mapping import place
from lightning_dpipe.planning.placement import Groups, card_bytes, groups_on, layouts, placed
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import expected_us
from synthetic import FrozenChain, model_profile
from unit.planning.clusters import cluster_of

FROZEN = (FrozenChain(name="vae", forward_us=(10,)),)


def all_groups(num_groups: int, num_devices: int, cluster: Cluster) -> Iterator[Groups]:
    """Every assignment that uses each node's devices once; equal ones many times over."""
    slots = [n for n in range(cluster.nodes) for _ in range(cluster.devices_per_node)]
    for order in set(itertools.permutations(slots)) if len(slots) < 8 else _halves(slots):
        nodes = tuple(order[g * num_devices : (g + 1) * num_devices] for g in range(num_groups))
        yield groups_on(nodes, cluster)


def _halves(slots: list[int]) -> Iterator[tuple[int, ...]]:
    """Two nodes: which positions the first one takes."""
    assert set(slots) == {0, 1}
    for first in itertools.combinations(range(len(slots)), len(slots) // 2):
        yield tuple(0 if i in first else 1 for i in range(len(slots)))


def cost(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[float, int]:
    """What `place` minimises, from the public functions."""
    busiest = max(card_bytes(plan, profile, cluster))
    simulated_us = expected_us(plan, placed(profile, plan, cluster))
    return max(simulated_us, busiest * 1e6 / cluster.nic_bytes_per_s), busiest


SHAPES = {(2, 2): (2, 4), (2, 3): (2, 3, 6), (3, 2): (2, 3, 6), (2, 4): (2, 4, 8)}


@pytest.mark.parametrize(
    ("nodes", "per_node", "num_stages"),
    [(*shape, stages) for shape, choices in SHAPES.items() for stages in choices],
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    width=st.sampled_from([0, 8, 400, 20_000]),
    trained_bytes=st.sampled_from([0, 10**4, 10**6, 10**7]),
    nic=st.sampled_from([10**8, 10**9, 10**10]),
    skip=st.booleans(),
    fill=st.booleans(),
)
def test_no_assignment_beats_the_mapping(
    nodes: int,
    per_node: int,
    num_stages: int,
    width: int,
    trained_bytes: int,
    nic: int,
    skip: bool,
    fill: bool,
) -> None:
    skips = [(0, 6), (2, 7)] if skip else []
    profile = model_profile(
        [100, 300, 200, 100, 50, 100, 400, 100],
        frozen=FROZEN,
        skips=skips,
        width=width,
        trained_bytes=trained_bytes,
    )
    cluster = cluster_of(nodes, per_node, nic=nic)
    plan = make_plan(
        profile,
        world_size=nodes * per_node,
        batch_size=2,
        num_stages=num_stages,
        num_microbatches=2,
        fill=fill,
    )
    found = place(plan, profile, cluster, max_parts=10**6)
    brute = min(
        cost(replace(plan, groups=groups), profile, cluster)
        for groups in set(all_groups(len(plan.groups), plan.num_devices, cluster))
    )
    assert found.exact
    assert (found.iteration_us, found.card_bytes) == brute
    assert cost(found.plan, profile, cluster) == brute
    assert found.plan.groups[0][-1] == 0


def test_replicated_stages_are_mapped_as_well_as_can_be() -> None:
    profile = model_profile([100] * 6, frozen=FROZEN, width=5000, trained_bytes=10**6)
    cluster = cluster_of(2, 3, nic=10**9)
    plan = make_plan(profile, world_size=6, batch_size=3, num_stages=2, num_microbatches=1)
    first, second = plan.stages
    stages = (replace(first, devices=(0, 1)), replace(second, devices=(2,)))
    plan = replace(plan, stages=stages, groups=((2, 1, 0), (5, 4, 3)), fills=())
    found = place(plan, profile, cluster, max_parts=10**6)
    brute = min(
        cost(replace(plan, groups=groups), profile, cluster)
        for groups in set(all_groups(2, 3, cluster))
    )
    assert found.exact
    assert (found.iteration_us, found.card_bytes) == brute


def test_heavy_weights_keep_stages_together_and_wide_values_keep_pipelines_together() -> None:
    cluster = cluster_of(2)
    heavy = model_profile([100] * 8, frozen=FROZEN, width=1, trained_bytes=10**7)
    wide = model_profile([100] * 8, frozen=FROZEN, width=10**5, trained_bytes=4)
    for profile, layout in ((heavy, 1), (wide, 0)):
        plan = make_plan(profile, world_size=8, batch_size=2, num_stages=2)
        assert place(plan, profile, cluster).plan.groups == layouts(8, 2, cluster)[layout]


def test_equal_mappings_leave_the_plan_as_it_is() -> None:
    profile = model_profile([100] * 8, frozen=FROZEN)
    plan = make_plan(profile, world_size=8, batch_size=2, num_stages=2)
    assert place(plan, profile, cluster_of(1, 8)).plan == plan
    alone = make_plan(profile, world_size=8, batch_size=2, num_stages=1)
    found = place(alone, profile, cluster_of(2))
    assert found.plan == alone
    assert found.exact  # data parallelism: every mapping is the same


def test_without_budget_the_best_regular_layout_is_bounded() -> None:
    profile = model_profile([100] * 8, frozen=FROZEN, width=400, trained_bytes=10**6)
    cluster = cluster_of(2, 3, nic=10**9)
    plan = make_plan(profile, world_size=6, batch_size=2, num_stages=3, num_microbatches=2)
    quick = place(plan, profile, cluster, max_parts=0)
    full = place(plan, profile, cluster, max_parts=10**6)
    assert quick.bound_us <= full.iteration_us <= quick.iteration_us


def test_links_that_are_slower_inside_than_between_are_taken_as_they_are() -> None:
    odd = replace(cluster_of(2, 2), inside=Link(latency_us=500, bytes_per_s=10**8))
    profile = model_profile([100] * 4, frozen=FROZEN, width=400, trained_bytes=10)
    plan = make_plan(profile, world_size=4, batch_size=2, num_stages=2, num_microbatches=2)
    found = place(plan, profile, odd, max_parts=10**6)
    brute = min(
        cost(replace(plan, groups=groups), profile, odd) for groups in set(all_groups(2, 2, odd))
    )
    assert found.exact
    assert (found.iteration_us, found.card_bytes) == brute

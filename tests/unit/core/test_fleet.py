"""Several kinds of devices in one profile."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError, ProfileError
from lightning_dpipe.core.fleet import device_profiles, fleet, groups_by_kind
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from synthetic import model_profile

FAST = replace(model_profile([10, 20], overhead_us=5), device="fast", memory_bytes=100)
SLOW = replace(model_profile([30, 40], overhead_us=9), device="slow", memory_bytes=50)


def plan(*groups: tuple[int, ...]) -> Plan:
    return Plan(
        graph_digest="", profile_digest="", groups=groups, stages=(), num_microbatches=1,
        batch_size=1, schedule="1f1b",
    )  # fmt: skip


def test_each_device_of_a_plan_has_the_profile_of_its_kind() -> None:
    both = fleet([FAST, SLOW], (1, 0, 0, 1))
    found = device_profiles(plan((2, 0), (1, 3)), both)
    assert [p.device for p in found] == ["fast", "slow"]
    assert [p.forward_us("net", 0, 2, 1) for p in found] == [30, 70]
    assert [p.memory_bytes for p in found] == [100, 50]
    assert both.overhead_us == 9
    alike = device_profiles(plan((0, 1)), FAST)
    assert alike == (FAST, FAST)


def test_a_profile_of_several_kinds_survives_a_file_and_old_ones_are_read() -> None:
    both = fleet([FAST, SLOW], (0, 1))
    assert from_data(Profile, to_data(both)) == both
    old = to_data(FAST)
    del old["kinds"], old["others"]
    assert from_data(Profile, old) == FAST


def test_one_kind_is_a_profile_as_before() -> None:
    assert fleet([FAST], (0, 0, 0)) is FAST


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"kinds \(0, 0\) for 2 profiles"):
        fleet([FAST, SLOW], (0, 0))
    with pytest.raises(ProfileError, match="different models"):
        fleet([FAST, model_profile([1, 2, 3])], (0, 1))
    with pytest.raises(ProfileError, match="kind 2, but the profile knows 2 kinds"):
        replace(fleet([FAST, SLOW], (0, 1)), kinds=(0, 2))
    both = fleet([FAST, SLOW], (0, 0, 1, 1))
    with pytest.raises(PlanError, match="devices of 4 ranks, the plan has 2"):
        device_profiles(plan((0, 1)), both)
    with pytest.raises(PlanError, match=r"group 1 has devices of kinds \(1, 1\), group 0"):
        device_profiles(plan((0, 1), (2, 3)), both)


@given(st.data())
def test_groups_hold_each_rank_once_with_equal_kinds_and_the_lowest_ranks_last(data) -> None:
    order = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    num_groups = data.draw(st.integers(1, 4))
    kinds = data.draw(st.permutations(order * num_groups))
    groups = groups_by_kind(order, kinds)
    assert sorted(r for g in groups for r in g) == list(range(len(kinds)))
    for group in groups:
        assert [kinds[rank] for rank in group] == order
        for kind in set(order):
            ranks = [rank for rank in group if kinds[rank] == kind]
            assert ranks == sorted(ranks, reverse=True)


def test_groups_of_unequal_kinds_are_refused() -> None:
    with pytest.raises(PlanError, match="cannot form groups"):
        groups_by_kind((0, 1), (0, 0, 0, 1))

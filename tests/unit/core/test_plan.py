"""How a stage's devices split rows: proportional, complete, nobody without."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.plan import Fill, Plan, Stage, split_by_shares, split_sizes

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def stage(shares: tuple[int, ...], num_devices: int) -> Stage:
    return Stage(backbone="net", start=0, stop=1, devices=tuple(range(num_devices)), shares=shares)


@given(total=st.integers(0, 300), shares=SHARES)
def test_parts_are_within_one_row_of_their_share_unless_one_would_get_none(total, shares) -> None:
    parts = split_by_shares(total, shares)
    assert sum(parts) == total
    assert min(parts) >= (total >= len(shares))
    exact = [total * share / sum(shares) for share in shares]
    if all(x >= 1 for x in exact):
        assert all(abs(part - x) < 1 for part, x in zip(parts, exact, strict=True))
    # Of two devices the one with the larger share never has fewer rows.
    for (a, x), (b, y) in itertools.combinations(zip(shares, parts, strict=True), 2):
        assert a == b or (x <= y if a < b else x >= y)


@given(total=st.integers(0, 300), num=st.integers(1, 8), weight=st.integers(1, 9))
def test_equal_shares_split_as_no_shares_do(total, num, weight) -> None:
    assert split_by_shares(total, (weight,) * num) == split_sizes(total, num)


@given(shares=SHARES)
def test_rows_as_shares_are_taken_as_they_are(shares) -> None:
    assert split_by_shares(sum(shares), shares) == tuple(shares)


def test_a_device_of_a_small_share_still_gets_a_row() -> None:
    assert split_by_shares(3, (1, 10)) == (1, 2)
    assert split_by_shares(1, (1, 10)) == (0, 1)  # one row cannot serve both
    assert split_by_shares(4, (1, 1, 10)) == (1, 1, 2)


def test_devices_take_their_rows_in_order() -> None:
    cut = stage((1, 2), 2)
    assert [cut.rows_on(d, 6) for d in (0, 1)] == [(0, 2), (2, 6)]
    assert [stage((), 2).rows_on(d, 5) for d in (0, 1)] == [(0, 3), (3, 5)]


@pytest.mark.parametrize("shares", [(1,), (1, 2, 3), (0, 1), (-1, 2)])
def test_shares_that_fit_no_devices_are_refused(shares) -> None:
    with pytest.raises(PlanError, match="one whole number of at least 1 per device"):
        stage(shares, 2)


def test_old_plans_without_shares_are_read() -> None:
    data = to_data(stage((), 2))
    del data["shares"]
    assert from_data(Stage, data) == stage((), 2)


def fill(**changes: object) -> Fill:
    whole = Fill(device=0, after=None, component="text", start=0, stop=2, first=0, last=4)
    return replace(whole, **changes)


PLAN = Plan(
    graph_digest="g",
    profile_digest="p",
    groups=((1, 0),),
    stages=(stage((), 1), replace(stage((), 1), devices=(1,), start=1, stop=2)),
    num_microbatches=2,
    batch_size=4,
    schedule="1f1b",
    fills=(fill(),),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 9}, r"num_microbatches=9, but a pipeline's batch has 8 samples"),
        ({"num_microbatches": 0}, "both must be at least 1"),
        ({"batch_size": 10**30}, "at most 16777216 samples"),
        ({"version": 2}, "the plan is of format 2, this release reads format 1"),
        ({"stages": (stage((), 3),)}, r"on devices \[0, 1, 2\]; a group has devices 0..1"),
        ({"fills": (fill(device=2),)}, "a fill of device 2 .* the group has devices 0..1"),
        ({"fills": (fill(owner=-1),)}, "samples of device -1; the group has devices 0..1"),
        ({"fills": (fill(last=5),)}, "on samples 0:5; a device has 4"),
    ],
)
def test_a_plan_is_on_the_devices_and_samples_that_there_are(changes, message) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PLAN, **changes)


def test_a_stage_has_layers_and_devices_a_fill_layers_and_samples() -> None:
    for changes in ({"start": 1}, {"start": -1}):
        with pytest.raises(PlanError, match="expected at least one, counted from 0"):
            replace(stage((), 1), **changes)
    for devices in ((), (0, 0)):
        with pytest.raises(PlanError, match="name at least one, and each once"):
            replace(stage((), 1), devices=devices)
    for changes in ({"start": 2}, {"start": -1}, {"first": 4}, {"first": -1}):
        with pytest.raises(PlanError, match="expected at least one of each, counted from 0"):
            fill(**changes)

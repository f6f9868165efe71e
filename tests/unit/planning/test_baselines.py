"""Predicted rivals against closed forms and a bucket-by-bucket account of their own."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.auto import Space, search
from lightning_dpipe.planning.baselines import (
    BUCKET_BYTES,
    Alternative,
    buckets_of,
    compare,
    least_work_us,
    useful_ratio,
)
from lightning_dpipe.planning.paper import paper_plan
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import expected_us
from synthetic import FrozenChain, model_profile, pair_profile

FROZEN = (FrozenChain(name="vae", forward_us=(40,)),)
RING = Link(latency_us=50, bytes_per_s=10**10)
MIB = 2**20


def profile_of(**changes: object) -> Profile:
    options = {"frozen": FROZEN, "allreduce": RING, "optimizer_us": 300, "overhead_us": 70}
    return model_profile([100, 80, 60, 40], **(options | changes))  # type: ignore[arg-type]


def rows(profile: Profile, world_size: int = 4, batch_size: int = 8) -> dict[str, Alternative]:
    plan = make_plan(profile, world_size=world_size, batch_size=batch_size, num_stages=1)
    return {a.name: a for a in compare(plan, profile)}


def ring_us(num_bytes: int, world_size: int, share: int = 2) -> int:
    """`share` 2: all-reduce, 1: reduce-scatter or all-gather."""
    moved = -(-share * (world_size - 1) * num_bytes // world_size)
    return RING.latency_us + -(-moved * 1_000_000 // RING.bytes_per_s)


COMPUTE_US = 8 * (40 + 280 + 560)  # frozen, forward, backward of 8 samples
OPTIMIZER_US, OVERHEAD_US = 4 * 300, 70


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ddp_without_overlap_is_the_sum_of_its_parts(world_size: int) -> None:
    found = rows(profile_of(trained_bytes=10 * MIB), world_size)["ddp"]
    sum_us = ring_us(40 * MIB, world_size)
    assert found.iteration_us == COMPUTE_US + sum_us + OPTIMIZER_US + OVERHEAD_US
    assert found.sync_us == sum_us
    assert found.samples_per_s == pytest.approx(8 * world_size * 1e6 / found.iteration_us)


def overlapped_us(
    layer_bytes: list[int], backward_us: list[int], world_size: int, share: int
) -> int:
    """End of the last bucket's reduction: buckets from the last layer on, one at a time."""
    now_us, busy_us, held, total = 8 * (40 + 280), 0, 0, len(layer_bytes)
    for i in range(total - 1, -1, -1):
        now_us += 8 * backward_us[i]
        held += layer_bytes[i]
        if held >= BUCKET_BYTES or i == 0:
            busy_us = max(busy_us, now_us) + ring_us(held, world_size, share)
            held = 0
    return max(busy_us, now_us)


@pytest.mark.parametrize("mib", [1, 10, 30, 60])
def test_overlapped_buckets_start_when_their_last_gradient_is_there(mib: int) -> None:
    found = rows(profile_of(trained_bytes=mib * MIB))["ddp_overlapped"]
    end_us = overlapped_us([mib * MIB] * 4, [200, 160, 120, 80], 4, 2)
    assert found.iteration_us == end_us + OPTIMIZER_US + OVERHEAD_US


@pytest.mark.parametrize("mib", [1, 30])
def test_zero_scatters_half_the_bytes_steps_a_share_and_gathers(mib: int) -> None:
    by_name = rows(profile_of(trained_bytes=mib * MIB))
    end_us = overlapped_us([mib * MIB] * 4, [200, 160, 120, 80], 4, 1)
    gather_us = ring_us(4 * mib * MIB, 4, 1)
    expected = end_us + OPTIMIZER_US / 4 + gather_us + OVERHEAD_US
    # Rounding: half the bytes of each bucket on the real link, or all on one twice as fast.
    assert by_name["zero1"].iteration_us == pytest.approx(expected, abs=5)
    # Two moments of 4 layers; a quarter of them stays.
    saved = 2 * 4 * mib * MIB * 3 // 4
    assert by_name["zero1"].peak_bytes == by_name["ddp_overlapped"].peak_bytes - saved


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_buckets_cover_the_layers_and_each_is_just_full(mib: list[int], cap: int) -> None:
    base = model_profile([1] * len(mib))
    layers = tuple(
        replace(x, trained_bytes=m) for x, m in zip(base.costs[0].layers, mib, strict=True)
    )
    profile = replace(base, costs=(replace(base.costs[0], layers=layers),))
    found = buckets_of(profile, "net", cap)
    assert [i for start, stop in found for i in range(start, stop)] == list(range(len(mib)))
    for start, stop in found[1:]:  # the first one takes what is left
        assert sum(mib[start:stop]) >= cap
        assert sum(mib[start + 1 : stop]) < cap


def test_ddp_splits_its_batch_only_as_far_as_memory_asks() -> None:
    profile = profile_of(width=1000, trained_bytes=4)
    whole = rows(profile)["ddp"]
    assert whole.fits is None
    tight = replace(profile, memory_bytes=whole.peak_bytes - 1)
    split = rows(tight)["ddp"]
    assert split.fits
    assert split.detail == "4 replicas, batch in 2"
    assert rows(replace(profile, memory_bytes=1))["ddp"].fits is False


def test_the_other_rows_are_what_their_planners_say() -> None:
    profile = profile_of()
    plan = make_plan(profile, world_size=4, batch_size=8)
    by_name = {a.name: a for a in compare(plan, profile)}
    assert next(iter(by_name)) == "plan"
    assert by_name["plan"].iteration_us == expected_us(plan, profile)
    assert by_name["plan_unfilled"].iteration_us == expected_us(replace(plan, fills=()), profile)
    paper = paper_plan(profile, world_size=4, batch_size=8)
    assert by_name["paper"].iteration_us == paper.expected_us
    unfilled = paper_plan(profile, world_size=4, batch_size=8, fill=False)
    assert by_name["pipeline_unfilled"].iteration_us == unfilled.expected_us
    ours = search(profile, world_size=4, batch_size=8, space=Space(max_plans=500)).expected_us
    assert ours <= min(a.iteration_us for n, a in by_name.items() if n != "zero1") * 1.0001


def test_a_world_without_a_pipeline_has_no_such_rows() -> None:
    assert set(rows(profile_of(frozen=()), world_size=1)) == {
        "plan", "ddp", "ddp_overlapped", "zero1",
    }  # fmt: skip


def test_several_backbones_are_compared_with_data_parallelism() -> None:
    pair = pair_profile(profile_of(trained_bytes=10 * MIB), model_profile([100, 100]))
    plan = make_plan(pair, world_size=2, batch_size=8)
    by_name = {a.name: a for a in compare(plan, pair)}
    assert set(by_name) == {"plan", "plan_unfilled", "ddp", "ddp_overlapped", "zero1"}
    assert by_name["plan"].detail.startswith("2 stages x 1")
    assert by_name["plan"].iteration_us == expected_us(plan, pair)
    # Both backbones run, are reduced (each on its own) and stepped on every device.
    compute_us = COMPUTE_US + 8 * 600
    ddp = by_name["ddp"].iteration_us
    assert ddp >= compute_us + OPTIMIZER_US
    assert least_work_us(pair, 8) == 8 * (40 + 840 + 600)
    assert by_name["zero1"].peak_bytes < by_name["ddp"].peak_bytes


def test_useful_work_is_full_batches_and_never_more_than_all() -> None:
    chain = (FrozenChain(name="vae", forward_us=(10,), fixed_us=100),)
    profile = model_profile([100, 100], frozen=chain, feedback=True)
    # frozen: once for 8 samples; trained: forward (twice in half of the steps) and backward.
    assert least_work_us(profile, 8) == 100 + 80 + 8 * 600
    assert least_work_us(profile, 8, probability=0.5) == 100 + 80 + 8 * 700
    for stages in (1, 2):
        plan = make_plan(profile, world_size=2, num_stages=stages, batch_size=8)
        ratio = useful_ratio(plan, profile, expected_us(plan, profile), 0.5)
        assert 0.5 < ratio <= 1.0

"""The search over devices of several kinds against every plan of small spaces."""

import itertools
import random
from dataclasses import replace

import pytest
from brute import all_recomputes
from mixed_brute import all_mixed_plans, random_fleet, slowed

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.fleet import fleet
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.auto import Found, Space, search
from lightning_dpipe.planning.baselines import compare, least_work_us
from lightning_dpipe.planning.explain import explain
from lightning_dpipe.planning.filling import lower_bound_us
from lightning_dpipe.planning.mixed import search_mixed
from lightning_dpipe.planning.pair_cuts import in_order
from lightning_dpipe.planning.paper import paper_plan
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import expected_us, with_fills
from lightning_dpipe.simulation.memory import peak_bytes
from synthetic import FrozenChain, model_profile

EVERY = 10**9


def exact(profile: Profile, *, batch_size: int, **options: object) -> Found:
    """Search until nothing that is left could be better."""
    space = Space(
        max_plans=EVERY, max_idle=None, max_nodes=None, close=0.0, max_shares=None,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return search_mixed(profile, world_size=len(profile.kinds), batch_size=batch_size, space=space)


@pytest.mark.parametrize("num_layers", range(1, 8))
@pytest.mark.parametrize("kinds", [(0, 1), (1, 0, 0), (0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 0)])
def test_no_assignment_of_kinds_and_no_share_simulates_faster(num_layers, kinds) -> None:
    rng = random.Random(100 * num_layers + len(kinds))
    for num_stages in range(1, min(3, num_layers, len(kinds)) + 1):
        conditioned = rng.random() < 0.3
        profile = random_fleet(rng, num_layers, kinds, frozen=False, feedback=conditioned)
        num_microbatches, batch_size = rng.randint(1, 3), rng.choice([2, 3])
        options = {
            "num_stages": num_stages,
            "batch_size": batch_size,
            "num_microbatches": num_microbatches,
        }
        plans = list(all_mixed_plans(profile, num_groups=1, **options))
        options |= {"group_devices": len(kinds), "fill": False}
        if not plans:  # a micro-batch has fewer rows than a stage devices
            with pytest.raises(PlanError, match="no plan for"):
                exact(profile, **options)
            continue
        found = exact(profile, **options)
        assert found.expected_us == min(expected_us(plan, profile) for plan in plans)
        assert found.expected_us == expected_us(found.plan, profile)
        assert found.bound_us == found.expected_us


@pytest.mark.parametrize("seed", range(4))
def test_no_assignment_fills_to_an_earlier_end(seed: int) -> None:
    rng = random.Random(seed)
    kinds = ((0, 1), (1, 0, 1))[seed % 2]
    profile = random_fleet(rng, rng.randint(2, 4), kinds, frozen=True, feedback=seed == 3)
    found = exact(profile, batch_size=3, num_microbatches=2, group_devices=len(kinds))
    ends = [
        expected_us(with_fills(plan, profile), profile)
        for num_stages in (1, 2, 3)
        if num_stages <= len(kinds)
        for plan in all_mixed_plans(
            profile, num_groups=1, num_stages=num_stages, batch_size=3, num_microbatches=2
        )
    ]
    assert found.expected_us == pytest.approx(min(ends))
    quick = search_mixed(
        profile, world_size=len(kinds), batch_size=3,
        space=Space(num_microbatches=2, group_devices=len(kinds), max_plans=1),
    )  # fmt: skip
    assert quick.bound_us <= min(ends) + 1e-6


def test_auto_also_finds_groups_and_microbatches() -> None:
    rng = random.Random(5)
    profile = random_fleet(rng, 3, (0, 0, 1, 1), frozen=False, feedback=False)
    found = exact(profile, batch_size=2, fill=False)
    plans = [
        plan
        for num_groups, num_microbatches in itertools.product((1, 2), (1, 2, 3, 4, 6, 8))
        for num_stages in range(1, 4)
        if num_microbatches <= 8 // num_groups and num_stages <= 4 // num_groups
        for plan in all_mixed_plans(
            profile,
            num_groups=num_groups,
            num_stages=num_stages,
            batch_size=2,
            num_microbatches=num_microbatches,
        )
    ]
    best = min(expected_us(plan, profile) for plan in plans)
    assert found.expected_us == best


@pytest.mark.parametrize("seed", range(6))
def test_each_kind_of_device_keeps_to_its_own_memory(seed: int) -> None:
    rng = random.Random(seed)
    base = random_fleet(rng, 4, (0, 1, 1), frozen=False, feedback=False)
    options = {"num_stages": 2, "batch_size": 2, "num_microbatches": 2}
    plans = [
        replace(plan, stages=stages)
        for plan in all_mixed_plans(base, num_groups=1, **options)
        for stages in all_recomputes(plan.stages)
    ]

    def peaks(plan) -> tuple[int, int]:
        """Of each kind."""
        found = [0, 0]
        for rank, held in zip(
            plan.groups[0], peak_bytes(plan, schedule_of(plan), base), strict=True
        ):
            found[base.kinds[rank]] = max(found[base.kinds[rank]], held)
        return found[0], found[1]

    by_plan = [(plan, peaks(plan)) for plan in plans]
    limits = rng.choice(by_plan)[1]
    (other,) = base.others
    profile = replace(
        base, memory_bytes=limits[0], others=(replace(other, memory_bytes=limits[1]),)
    )
    fitting = [p for p, held in by_plan if held[0] <= limits[0] and held[1] <= limits[1]]
    found = exact(profile, fill=False, **options)
    assert all(a <= b for a, b in zip(peaks(found.plan), limits, strict=True))
    assert found.expected_us == min(expected_us(plan, profile) for plan in fitting)
    assert in_order(found.plan, profile) == found.plan


def test_two_devices_of_speeds_one_and_two_come_near_the_ideal_of_three_halves() -> None:
    fast = model_profile(
        [50] * 8, frozen=(FrozenChain(name="vae", forward_us=(40, 40)),), trained_bytes=0
    )
    profile = fleet([slowed(fast, 2.0), fast], (0, 1))
    plan = search_mixed(profile, world_size=2, batch_size=32).plan
    equal_us = 32 * 2 * (8 * 150 + 80)  # the slow device with its own batch
    # Whole rows: 20 and 44 of 64, with the frozen work 55 360 us.
    assert equal_us / expected_us(plan, profile) > 1.47


def test_slow_links_leave_data_parallelism_with_shares_by_speed() -> None:
    fast = model_profile([100] * 4, p2p=Link(latency_us=50_000, bytes_per_s=10**6))
    profile = fleet([fast, slowed(fast, 3.0)], (0, 1))
    plan = search_mixed(profile, world_size=2, batch_size=32).plan
    (stage,) = plan.stages
    kinds = [profile.kinds[rank] for rank in plan.groups[0]]
    rows = dict(zip(kinds, stage.split(64), strict=True))
    assert (rows[0], rows[1]) == (48, 16)


def test_few_splits_come_near_all_of_them() -> None:
    for seed in range(5):
        rng = random.Random(seed)
        profile = random_fleet(rng, 5, (0, 1, 1), frozen=True, feedback=False)
        every = search_mixed(
            profile,
            world_size=3,
            batch_size=8,
            space=Space(max_shares=None, max_plans=200, max_idle=None),
        )
        few = search_mixed(profile, world_size=3, batch_size=8)
        assert few.expected_us <= 1.03 * every.expected_us


def test_a_world_too_large_for_one_pipeline_still_shares_by_speed() -> None:
    fast = model_profile([100] * 4)
    kinds = (0,) * 9 + (1,) * 8
    profile = fleet([fast, slowed(fast, 2.0)], kinds)
    plan = search_mixed(profile, world_size=17, batch_size=8).plan
    assert (len(plan.groups), len(plan.stages), plan.num_devices) == (1, 1, 17)
    assert len(set(plan.stages[0].shares)) > 1


def test_worlds_and_groups_that_do_not_fit_are_refused() -> None:
    fast = model_profile([100] * 4)
    profile = fleet([fast, slowed(fast, 2.0)], (0, 0, 1))
    with pytest.raises(PlanError, match="devices of 3 ranks, the world has 4"):
        search_mixed(profile, world_size=4, batch_size=8)
    with pytest.raises(PlanError, match=r"cannot form equal pipelines of 1 devices.*have 3"):
        search_mixed(profile, world_size=3, batch_size=8, space=Space(group_devices=1))
    with pytest.raises(UnsupportedError, match="2 kinds of devices"):
        search(profile, world_size=3, batch_size=8)


def test_make_plan_takes_a_fixed_number_of_stages_on_any_devices() -> None:
    fast = model_profile([100] * 6, frozen=(FrozenChain(name="vae", forward_us=(40,)),))
    profile = fleet([fast, slowed(fast, 2.0)], (0, 0, 1))
    plan = make_plan(profile, world_size=3, batch_size=8, num_stages=2)
    assert len(plan.stages) == 2
    assert plan.num_devices == 3
    whole = make_plan(profile, world_size=3, batch_size=8, num_microbatches=4)
    assert (len(whole.stages), whole.num_microbatches) == (3, 4)
    auto = make_plan(profile, world_size=3, batch_size=8, num_stages="auto")
    best = expected_us(auto, profile)
    assert best <= min(expected_us(plan, profile), expected_us(whole, profile)) * 1.001
    text = explain(auto, profile)
    assert f"lower bound {lower_bound_us(auto, profile) / 1e3:.2f} ms" in text
    with pytest.raises(PlanError, match="give no cuts"):
        make_plan(profile, world_size=3, batch_size=8, cuts=(2, 4))


def test_the_paper_planner_refuses_several_kinds() -> None:
    fast = model_profile([100] * 4)
    profile = fleet([fast, slowed(fast, 2.0)], (0, 1))
    with pytest.raises(UnsupportedError, match="has 2 kinds"):
        paper_plan(profile, world_size=2, batch_size=8)
    with pytest.raises(UnsupportedError, match="objective='paper' for 2 kinds"):
        make_plan(profile, world_size=2, batch_size=8, objective="paper")


@pytest.mark.parametrize(
    ("counts", "groups"),
    [((8, 8), {2, 4, 8}), ((2, 6), {1, 2}), ((5, 6), {1}), ((9, 8), {1})],
)
def test_groups_are_equal_and_large_only_where_no_smaller_ones_are(counts, groups) -> None:
    kinds = (0,) * counts[0] + (1,) * counts[1]
    fast = model_profile([100] * 3)
    profile = fleet([fast, slowed(fast, 2.0)], kinds)
    tried: set[int] = set()

    def network(seen: Profile, num_devices: int) -> Profile:
        tried.add(sum(counts) // num_devices)
        return seen

    space = Space(network=network, num_microbatches=2, max_plans=1, num_stages=1)
    search_mixed(profile, world_size=sum(counts), batch_size=8, space=space)
    assert tried == groups


def test_baselines_for_alike_devices_wait_for_the_slowest_kind() -> None:
    fast = model_profile([100] * 6, frozen=(FrozenChain(name="vae", forward_us=(40,)),))
    slow = slowed(fast, 2.0)
    profile = fleet([fast, slow], (0, 1))
    plan = make_plan(profile, world_size=2, batch_size=16, num_stages="auto")
    found = {a.name: a for a in compare(plan, profile)}
    alike = make_plan(slow, world_size=2, batch_size=16, num_stages="auto")
    wanted = {a.name: a for a in compare(alike, slow)}
    assert found["plan"].iteration_us == expected_us(plan, profile)
    assert found["ddp"] == wanted["ddp"]
    assert found["paper"] == wanted["paper"]
    assert found["ddp"].iteration_us > 1.4 * found["plan"].iteration_us
    least_us = least_work_us(profile, 16, num_devices=2)
    one, two = (least_work_us(p, 16, num_devices=2) for p in (fast, slow))
    assert least_us == pytest.approx(2 / (1 / one + 1 / two))
    assert 0.95 < least_us / found["plan"].iteration_us <= 1.0

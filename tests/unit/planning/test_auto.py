"""The search against every plan of small spaces."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from brute import all_recomputes, all_stages, plan_with, random_profile

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.auto import Found, Space, search
from lightning_dpipe.planning.buckets import bucket_stages
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.stage_costs import BackboneCosts
from lightning_dpipe.planning.variants import expected_bound_us, expected_us, with_fills
from lightning_dpipe.simulation.memory import peak_bytes
from synthetic import FrozenChain, model_profile

EVERY = 10**9


def exact(profile: Profile, **options: object) -> Found:
    """Search until nothing that is left could be better."""
    world = {name: options.pop(name) for name in ("world_size", "batch_size")}
    space = Space(max_plans=EVERY, max_idle=None, max_nodes=None, close=0.0, **options)  # type: ignore[arg-type]
    return search(profile, space=space, **world)  # type: ignore[arg-type]


def sizes(max_layers: int) -> Iterator[tuple[int, int, int]]:
    """(layers, devices, stages)."""
    for layers, devices, stages in itertools.product(
        range(1, max_layers + 1), range(1, 5), range(1, 4)
    ):
        if stages <= min(devices, layers):
            yield layers, devices, stages


@pytest.mark.parametrize("num_layers", range(1, 10))
@pytest.mark.parametrize("seed", range(2))
def test_no_cut_and_no_replication_simulates_faster(num_layers: int, seed: int) -> None:
    rng = random.Random(num_layers + 100 * seed)
    for layers, num_devices, num_stages in sizes(num_layers):
        if layers != num_layers:
            continue
        conditioned = rng.random() < 0.3
        profile = random_profile(rng, layers, frozen=False, feedback=conditioned)
        num_microbatches, batch_size = rng.randint(1, 4), rng.choice([4, 5, 8])
        schedule = rng.choice(["1f1b", "gpipe"])
        found = exact(
            profile,
            world_size=2 * num_devices,
            batch_size=batch_size,
            group_devices=num_devices,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedules=(schedule,),
            fill=False,
        )
        plans = [
            plan_with(
                stages,
                num_groups=2,
                batch_size=batch_size,
                num_microbatches=num_microbatches,
                schedule=schedule,
            )
            for stages in all_stages(layers, num_stages, num_devices)
        ]
        assert found.expected_us == min(expected_us(plan, profile) for plan in plans)
        assert found.expected_us == expected_us(found.plan, profile)
        assert found.bound_us == found.expected_us


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_fills_to_an_earlier_end_and_the_bound_holds_for_all(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, num_devices, num_stages = rng.choice([s for s in sizes(6) if s[2] > 1])
    profile = random_profile(rng, num_layers, frozen=True, feedback=seed % 2 == 0)
    options = {"batch_size": 6, "num_microbatches": rng.randint(1, 4)}
    found = exact(
        profile,
        world_size=num_devices,
        group_devices=num_devices,
        num_stages=num_stages,
        probability=0.3,
        **options,
    )
    plans = [
        plan_with(stages, num_groups=1, **options)  # type: ignore[arg-type]
        for stages in all_stages(num_layers, num_stages, num_devices)
    ]
    ends = [expected_us(with_fills(plan, profile), profile, 0.3) for plan in plans]
    assert found.expected_us == pytest.approx(min(ends))
    quick = search(
        profile,
        world_size=num_devices,
        batch_size=6,
        space=Space(
            group_devices=num_devices,
            num_stages=num_stages,
            num_microbatches=options["num_microbatches"],
            probability=0.3,
            max_plans=1,
        ),
    )
    assert quick.bound_us <= min(ends) + 1e-6
    for plan, end in zip(plans, ends, strict=True):
        assert expected_bound_us(plan, profile, 0.3) <= end + 1e-6


@pytest.mark.parametrize("num_layers", range(1, 10))
def test_within_a_memory_limit_each_stage_recomputes_only_if_that_pays(num_layers: int) -> None:
    rng = random.Random(num_layers)
    refused = 0
    for layers, num_devices, num_stages in sizes(num_layers):
        if layers != num_layers:
            continue
        profile = random_profile(rng, num_layers, frozen=False, feedback=False)
        batch_size, num_microbatches = 6, rng.randint(1, 4)
        plans = [
            plan_with(
                stages, num_groups=1, batch_size=batch_size, num_microbatches=num_microbatches
            )
            for cut in all_stages(num_layers, num_stages, num_devices)
            for stages in all_recomputes(cut)
        ]
        peaks = {plan: max(peak_bytes(plan, schedule_of(plan), profile)) for plan in plans}
        limit = rng.choice(sorted(peaks.values())[: max(1, len(peaks) // 2)]) - rng.randint(0, 1)
        limited = replace(profile, memory_bytes=limit)
        fitting = [plan for plan, peak in peaks.items() if peak <= limit]
        options = {
            "world_size": num_devices,
            "batch_size": batch_size,
            "group_devices": num_devices,
            "num_stages": num_stages,
            "num_microbatches": num_microbatches,
            "fill": False,
        }
        if not fitting:
            refused += 1
            with pytest.raises(
                PlanError, match=r"within .* GiB a device, where weights, .* take .* GiB"
            ):
                exact(limited, **options)
            continue
        found = exact(limited, **options)
        assert max(peak_bytes(found.plan, schedule_of(found.plan), limited)) <= limit
        assert found.expected_us == min(expected_us(plan, profile) for plan in fitting)
    assert refused > 0


def all_plans(profile: Profile, world_size: int, batch_size: int) -> Iterator[Plan]:
    """Everything the search may choose from, filled."""
    num_layers = len(profile.graph.component("net").layers)
    for devices in (d for d in range(1, world_size + 1) if world_size % d == 0):
        for stages in range(1, min(devices, num_layers) + 1):
            for microbatches in (1, 2, 3, 4, 6, 8, 12):
                if microbatches > batch_size * devices:
                    continue
                for cut in all_stages(num_layers, stages, devices):
                    plan = plan_with(
                        cut,
                        num_groups=world_size // devices,
                        batch_size=batch_size,
                        num_microbatches=microbatches,
                    )
                    smallest = batch_size * devices // microbatches
                    if all(len(s.devices) <= smallest for s in cut):
                        yield with_fills(plan, profile)
    for stages in bucket_stages(BackboneCosts(profile, "net")):
        for microbatches in range(1, batch_size + 1):
            plan = plan_with(
                stages,
                num_groups=world_size,
                batch_size=batch_size,
                num_microbatches=microbatches,
            )
            yield with_fills(plan, profile)


@pytest.mark.parametrize("seed", range(3))
def test_auto_finds_the_best_stages_microbatches_devices_and_replicas(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, 4, frozen=True, feedback=False)
    found = exact(profile, world_size=4, batch_size=3)
    best = min(expected_us(plan, profile) for plan in all_plans(profile, 4, 3))
    assert found.expected_us == best
    plan = make_plan(profile, world_size=4, batch_size=3, num_stages="auto")
    assert expected_us(plan, profile) <= 1.001 * best


def test_data_parallelism_wins_where_links_are_slow_and_reduction_is_free() -> None:
    profile = model_profile(
        [100] * 4,
        frozen=(FrozenChain(name="vae", forward_us=(50,)),),
        p2p=Link(latency_us=10_000, bytes_per_s=10**6),
    )
    plan = make_plan(profile, world_size=4, batch_size=8, num_stages="auto")
    assert (len(plan.stages), len(plan.groups), plan.num_microbatches) == (1, 4, 1)


def test_a_pipeline_wins_where_reduction_is_slow() -> None:
    profile = model_profile(
        [100] * 4,
        frozen=(FrozenChain(name="vae", forward_us=(50,)),),
        trained_bytes=10**6,
        allreduce=Link(latency_us=10, bytes_per_s=10**8),
        width=0,
    )
    plan = make_plan(profile, world_size=4, batch_size=8, num_stages="auto")
    assert len(plan.stages) == 4


def test_auto_microbatches_keep_the_stages_that_were_asked_for() -> None:
    profile = random_profile(random.Random(1), 6, frozen=True, feedback=False)
    plan = make_plan(profile, world_size=4, batch_size=8, num_stages=2, num_microbatches="auto")
    assert [s.devices for s in plan.stages] == [(0,), (1,)]
    assert len(plan.groups) == 2
    whole = make_plan(profile, world_size=4, batch_size=8, num_microbatches="auto")
    assert [len(s.devices) for s in whole.stages] == [1, 1, 1, 1]
    with pytest.raises(PlanError, match="fix the stages"):
        make_plan(profile, world_size=2, batch_size=8, cuts=(2,), num_microbatches="auto")


def test_the_plan_is_the_same_every_time_and_progress_is_told() -> None:
    profile = random_profile(random.Random(2), 7, frozen=True, feedback=True)
    told: list[tuple[int, float, float]] = []
    first = search(profile, world_size=4, batch_size=8, progress=lambda *state: told.append(state))
    assert first == search(profile, world_size=4, batch_size=8)
    assert 0 < len(told) <= first.num_plans
    assert all(bound_us <= best_us for _, best_us, bound_us in told)


def test_within_the_margin_the_plan_of_fewer_stages_and_microbatches_is_taken() -> None:
    slow = Link(latency_us=10, bytes_per_s=2_000_000)
    profile = model_profile([100] * 8, allreduce=slow)
    exact = search(profile, world_size=4, batch_size=8)
    simple = search(profile, world_size=4, batch_size=8, space=Space(margin=1.0))

    def effort(plan: Plan) -> tuple[int, int]:
        return len(plan.stages) if plan.num_devices > 1 else 1, plan.num_microbatches

    assert effort(simple.plan) < effort(exact.plan)
    assert exact.expected_us < simple.expected_us <= 2 * exact.expected_us

"""Plans of several backbones against every cut of both directions and every replication."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from brute import all_recomputes
from pair_brute import all_positions, pair_plan, random_pair

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.auto import Found, Space, search
from lightning_dpipe.planning.buckets import bucket_stages
from lightning_dpipe.planning.directions import Directions, costs_of
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import expected_us, with_fills
from lightning_dpipe.simulation.check import check_schedule
from lightning_dpipe.simulation.memory import peak_bytes
from synthetic import FrozenChain, model_profile, pair_profile

EVERY = 10**9


def exact(profile: Profile, **options: object) -> Found:
    """Search until nothing that is left could be better."""
    world = {name: options.pop(name) for name in ("world_size", "batch_size")}
    space = Space(max_plans=EVERY, max_idle=None, max_nodes=None, close=0.0, **options)  # type: ignore[arg-type]
    return search(profile, space=space, **world)  # type: ignore[arg-type]


def directions_of(profile: Profile) -> Directions:
    found = costs_of(profile)
    assert isinstance(found, Directions)
    return found


def sizes(num_down: int, most_up: int) -> Iterator[tuple[int, int, int]]:
    """(up layers, devices, positions)."""
    for num_up, devices, positions in itertools.product(
        range(1, most_up + 1), range(1, 5), range(1, 4)
    ):
        if positions <= min(devices, num_down, num_up):
            yield num_up, devices, positions


@pytest.mark.parametrize("num_down", range(1, 6))
def test_no_cut_of_either_direction_and_no_replication_simulates_faster(num_down: int) -> None:
    rng = random.Random(num_down)
    for num_up, num_devices, num_positions in sizes(num_down, 4):
        profile = random_pair(rng, num_down, num_up, feedback=rng.random() < 0.3)
        options = {
            "batch_size": rng.choice([4, 5, 8]),
            "num_microbatches": rng.randint(1, 4),
        }
        schedule = rng.choice(["1f1b", "gpipe"])
        found = exact(
            profile,
            world_size=2 * num_devices,
            group_devices=num_devices,
            num_stages=num_positions,
            schedules=(schedule,),
            fill=False,
            **options,
        )
        directions = directions_of(profile)
        ends = [
            expected_us(
                pair_plan(profile, directions, cut, num_groups=2, schedule=schedule, **options),
                profile,
            )
            for cut in all_positions(num_down, num_up, num_positions, num_devices)
        ]
        assert found.expected_us == min(ends)
        assert found.expected_us == expected_us(found.plan, profile)
        assert found.bound_us == found.expected_us


@pytest.mark.parametrize("num_down", range(1, 4))
def test_within_a_memory_limit_each_stage_recomputes_only_if_that_pays(num_down: int) -> None:
    rng = random.Random(num_down)
    refused = 0
    for num_up, num_devices, num_positions in sizes(num_down, 3):
        profile = random_pair(rng, num_down, num_up)
        options = {"batch_size": 6, "num_microbatches": rng.randint(1, 4)}
        directions = directions_of(profile)
        peaks: dict[Plan, int] = {}
        for cut in all_positions(num_down, num_up, num_positions, num_devices):
            plain = pair_plan(profile, directions, cut, num_groups=1, **options)
            for stages in all_recomputes(plain.stages):
                plan = pair_plan(profile, directions, cut, num_groups=1, stages=stages, **options)
                peaks[plan] = max(peak_bytes(plan, schedule_of(plan), profile))
        limit = rng.choice(sorted(peaks.values())[: max(1, len(peaks) // 2)]) - rng.randint(0, 1)
        limited = replace(profile, memory_bytes=limit)
        fitting = [plan for plan, peak in peaks.items() if peak <= limit]
        options |= {"world_size": num_devices, "group_devices": num_devices}
        options |= {"num_stages": num_positions, "fill": False}
        if not fitting:
            refused += 1
            with pytest.raises(PlanError, match="no plan for"):
                exact(limited, **options)
            continue
        found = exact(limited, **options)
        assert max(peak_bytes(found.plan, schedule_of(found.plan), limited)) <= limit
        assert found.expected_us == min(expected_us(plan, profile) for plan in fitting)
    assert refused > 0


def all_plans(profile: Profile, num_layers: tuple[int, int], batch_size: int) -> Iterator[Plan]:
    """Everything the search may choose from on two devices, filled."""
    directions = directions_of(profile)
    for devices, microbatches in itertools.product((1, 2), range(1, 2 * batch_size + 1)):
        options = {"batch_size": batch_size, "num_microbatches": microbatches}
        if microbatches > batch_size * devices or microbatches not in (1, 2, 3, 4, 6):
            continue
        for positions in range(1, devices + 1):
            for cut in all_positions(*num_layers, positions, devices):
                if batch_size * devices // microbatches >= max(p.replicas for p in cut):
                    plan = pair_plan(profile, directions, cut, num_groups=2 // devices, **options)
                    yield with_fills(plan, profile)
        if devices == 1:
            whole = next(all_positions(*num_layers, 1, 1))
            for stages in bucket_stages(directions):
                plan = pair_plan(profile, directions, whole, num_groups=2, stages=stages, **options)
                yield with_fills(plan, profile)


@pytest.mark.parametrize("seed", range(4))
def test_auto_finds_the_best_filled_plan_of_two_backbones(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_pair(rng, 4, 3, frozen=True, feedback=seed == 3)
    found = exact(profile, world_size=2, batch_size=3)
    ends = [expected_us(plan, profile) for plan in all_plans(profile, (4, 3), 3)]
    assert found.expected_us == pytest.approx(min(ends))
    quick = search(profile, world_size=2, batch_size=3, space=Space(max_plans=1))
    assert quick.bound_us <= min(ends) + 1e-6
    plan = make_plan(profile, world_size=2, batch_size=3, num_stages="auto")
    assert expected_us(plan, profile) <= 1.01 * min(ends)


def test_a_pipeline_in_two_directions_wins_where_reduction_is_slow() -> None:
    parts = [
        model_profile(
            [100] * n,
            frozen=(FrozenChain(name="vae", forward_us=(50,)),) if n == 4 else (),
            trained_bytes=10**6,
            allreduce=Link(latency_us=10, bytes_per_s=10**8),
            width=0,
        )
        for n in (4, 5)
    ]
    profile = pair_profile(*parts)
    plan = make_plan(profile, world_size=4, batch_size=8, num_stages="auto")
    assert plan.num_devices > 1
    down, up = plan.chains
    assert [plan.stages[i].devices for i in down] == sorted(plan.stages[i].devices for i in down)
    assert [plan.stages[i].devices for i in up] == [plan.stages[i].devices for i in reversed(down)]
    check_schedule(schedule_of(plan), plan, profile.graph)


def test_data_parallelism_wins_where_links_are_slow_and_reduction_is_free() -> None:
    slow = Link(latency_us=10_000, bytes_per_s=10**6)
    profile = pair_profile(model_profile([100] * 4, p2p=slow), model_profile([100] * 3))
    plan = make_plan(profile, world_size=4, batch_size=8, num_stages="auto")
    assert len(plan.groups) == 4
    assert {s.devices for s in plan.stages} == {(0,)}


def test_three_backbones_share_positions_and_the_plan_is_the_same_every_time() -> None:
    rng = random.Random(5)
    profile = random_pair(rng, 6, 5, 4, frozen=True)
    options = {"world_size": 4, "batch_size": 8}
    space = Space(num_stages=2, group_devices=4)
    found = search(profile, space=space, **options)  # type: ignore[arg-type]
    assert found == search(profile, space=space, **options)  # type: ignore[arg-type]
    assert found.bound_us <= found.expected_us
    homes = [[found.plan.stages[i].devices for i in chain] for chain in found.plan.chains]
    assert homes[0] == homes[2] == homes[1][::-1]
    check_schedule(schedule_of(found.plan), found.plan, profile.graph)


def test_backbones_that_feed_each_other_are_refused_by_name() -> None:
    profile = pair_profile(model_profile([100] * 2), model_profile([100] * 2))
    graph = profile.graph
    first, second = graph.backbones
    reader = replace(second.layers[0], reads=(*second.layers[0].reads, first.layers[1].writes[0]))
    second = replace(second, layers=(reader, *second.layers[1:]))
    fed = replace(profile, graph=replace(graph, components=(first, second)))
    with pytest.raises(UnsupportedError, match=r"'net1' reads .* which backbone 'net0' writes"):
        make_plan(fed, world_size=2, batch_size=4, num_stages="auto")

"""Who encodes whose samples: shares against the idle time they are meant to use."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.fills import Run
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.filling import fill
from lightning_dpipe.planning.moving import nudged, runs_for, shared_floor_us
from lightning_dpipe.planning.placing import Problem, Rule, place
from lightning_dpipe.planning.search import make_plan, schedule_of
from lightning_dpipe.simulation.deliveries import Deliveries
from lightning_dpipe.simulation.simulate import simulate, steady_shape
from lightning_dpipe.simulation.tasks import task_graph
from synthetic import FrozenChain, model_profile


def problem_of(profile: Profile, plan: Plan) -> Problem:
    schedule = schedule_of(plan)
    shape = replace(steady_shape(plan, schedule), encoded=True, next_sizes=None)
    return Problem(
        graph=task_graph(plan, schedule, profile, shape),
        works=(FrozenCosts.of(profile, samples=plan.batch_size),) * plan.num_devices,
        deliveries=Deliveries(
            plan=plan, profile=profile, sizes=(plan.batch_size,) * plan.num_devices
        ),
    )


def uneven(
    num_stages: int, batch_size: int, *, text_us: int = 300, width: int = 0, **options: object
) -> tuple[Profile, Plan]:
    """Stage 0 has twice the layers of each other stage."""
    profile = model_profile(
        [200] * (num_stages + 1),
        frozen=(FrozenChain(name="text", forward_us=(text_us, text_us)),),
        width=width,
        **options,  # type: ignore[arg-type]
    )
    plan = make_plan(
        profile,
        world_size=num_stages,
        batch_size=batch_size,
        num_microbatches=num_stages,
        cuts=tuple(range(2, num_stages + 1)),
        fill=False,
    )
    return profile, plan


def covered(runs: tuple[Run, ...], num_devices: int, samples: int) -> bool:
    """Every sample of every device once, its owner's part first."""
    for owner in range(num_devices):
        mine = [r for r in runs if r.owner == owner]
        if [i for r in mine for i in range(r.first, r.last)] != list(range(samples)):
            return False
        if any(r.device == owner for r in mine[1:]):
            return False
    return True


@settings(deadline=None, max_examples=60)
@given(
    num_stages=st.integers(2, 5),
    batch_size=st.integers(1, 9),
    text_us=st.integers(1, 900),
    share=st.floats(0, 1.5),
)
def test_runs_cover_every_sample_and_load_no_device_beyond_the_target(
    num_stages: int, batch_size: int, text_us: int, share: float
) -> None:
    profile, plan = uneven(num_stages, batch_size, text_us=text_us)
    problem = problem_of(profile, plan)
    work = problem.work
    target_us = int(share * shared_floor_us(problem))
    runs = runs_for(problem, target_us)
    assert covered(runs, num_stages, batch_size)
    loads_us = list(problem.loads_us)
    for run in runs:
        loads_us[run.device] += work.chain_us(run.last - run.first)
    at_home = [load + work.chain_us(batch_size) for load in problem.loads_us]
    for device, load_us in enumerate(loads_us):
        assert load_us <= max(target_us, at_home[device])
        if at_home[device] <= target_us:
            assert all(r.device == device for r in runs if r.owner == device), "no need to give"


def test_a_target_that_all_can_meet_moves_nothing_and_one_that_none_can_moves_nothing() -> None:
    profile, plan = uneven(3, 6)
    problem = problem_of(profile, plan)
    assert runs_for(problem, 10**9) == problem.at_home
    assert runs_for(problem, 0) == problem.at_home


def test_at_the_floor_the_longest_stage_gives_its_samples_to_the_others() -> None:
    profile, plan = uneven(3, 6)
    problem = problem_of(profile, plan)
    runs = runs_for(problem, shared_floor_us(problem))
    given_away = [r for r in runs if r.owner != r.device]
    assert {r.owner for r in given_away} == {0}
    kept = next(r for r in runs if (r.owner, r.device) == (0, 0))
    room_us = shared_floor_us(problem) - problem.loads_us[0]
    assert problem.work.chain_us(kept.last) <= room_us < problem.work.chain_us(kept.last + 1)


def test_nudges_go_from_the_device_that_ends_last_to_the_one_that_ends_first() -> None:
    profile, plan = uneven(2, 8)
    problem = problem_of(profile, plan)
    home = place(problem, problem.at_home, Rule())
    assert home.device_end_us[0] > home.device_end_us[1]
    offers = list(nudged(problem, home))
    assert offers
    given_away = [sum(r.last - r.first for r in runs if r.device == 1) - 8 for runs in offers]
    assert given_away == sorted(given_away, reverse=True)
    assert given_away[-1] == 1
    assert all(covered(runs, 2, 8) for runs in offers)
    # Samples that came from the device which now has time go back first.
    there = tuple(r for runs in offers[:1] for r in runs)
    late = replace(place(problem, there, Rule()), device_end_us=(0, 10**6))
    back = next(nudged(problem, late))
    assert sum(r.last - r.first for r in back if (r.owner, r.device) == (0, 0)) > sum(
        r.last - r.first for r in there if (r.owner, r.device) == (0, 0)
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_share_of_a_tiny_problem_beats_the_search(seed: int) -> None:
    """Brute force over who encodes how many of whom, each filled without moving any further."""
    rng = random.Random(seed)
    num_stages, batch_size = rng.choice([(2, 3), (2, 4), (3, 2)])
    link = Link(latency_us=rng.choice([0, 20]), bytes_per_s=10**8, host_us=rng.choice([0, 4]))
    profile, plan = uneven(
        num_stages, batch_size, text_us=rng.randint(50, 600), width=64, p2p=link,
        fill_us=rng.choice([0, 15]),
    )  # fmt: skip
    problem, schedule = problem_of(profile, plan), schedule_of(plan)
    best_us = min(
        place(problem, runs, Rule(order=order, eager=eager), target_us).end_us
        for runs in all_runs(num_stages, batch_size)
        for order in (None, (0, 1))
        for eager in (False, True)
        for target_us in (None, shared_floor_us(problem))
    )
    ours = replace(plan, fills=fill(plan, schedule, profile))
    assert simulate(ours, schedule, profile).end_us <= 1.01 * best_us


def all_runs(num_devices: int, samples: int) -> list[tuple[Run, ...]]:
    """Every way in which each owner's samples are shared out, its own part first."""
    rows = [
        counts
        for counts in product(range(samples + 1), repeat=num_devices)
        if sum(counts) == samples
    ]
    found = []
    for table in product(rows, repeat=num_devices):
        runs = []
        for owner, counts in enumerate(table):
            first = 0
            for device in sorted(range(num_devices), key=lambda d: (d != owner, d)):
                if counts[device]:
                    runs.append(Run(owner, device, first, first + counts[device]))
                    first += counts[device]
        found.append(tuple(runs))
    return found


def test_messages_that_cost_more_than_they_save_keep_samples_at_home() -> None:
    dear = Link(latency_us=0, bytes_per_s=10**12, host_us=5000)  # all 8 samples take 4800 us
    profile, plan = uneven(2, 8, width=64, p2p=dear)
    fills = fill(plan, schedule_of(plan), profile)
    assert all(f.owner is None for f in fills)
    fast = replace(profile, p2p=replace(dear, host_us=1))
    assert any(f.owner == 0 for f in fill(plan, schedule_of(plan), fast))


@pytest.mark.parametrize("seed", range(12))
def test_what_the_walk_says_is_what_the_simulator_says(seed: int) -> None:
    """Ends, with guests, fill starts, host costs and late rows, microsecond by microsecond."""
    rng = random.Random(seed)
    link = Link(
        latency_us=rng.choice([0, 400]),
        bytes_per_s=rng.choice([10**6, 10**8]),
        host_us=rng.choice([0, 7]),
        host_bytes_per_s=rng.choice([0, 10**8]),
    )
    profile, plan = uneven(
        rng.choice([2, 3]), 6, text_us=rng.randint(50, 900), width=64, p2p=link,
        fill_us=rng.choice([0, 30]), overhead_us=11,
    )  # fmt: skip
    problem, schedule = problem_of(profile, plan), schedule_of(plan)
    runs = rng.choice(all_runs(plan.num_devices, 2))
    runs = tuple(Run(r.owner, r.device, 3 * r.first, 3 * r.last) for r in runs)
    found = place(problem, runs, Rule(eager=rng.random() < 0.5), shared_floor_us(problem))
    fills = tuple(
        f
        for (device, num_done), pieces in sorted(found.slots.items())
        for f in problem.work.fills(
            pieces, device, schedule.orders[device][num_done - 1] if num_done else None
        )
    )
    timeline = simulate(replace(plan, fills=fills), schedule, profile)
    assert timeline.end_us == found.end_us + 11

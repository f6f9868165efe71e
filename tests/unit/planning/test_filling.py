import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.fills import encoders
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.planning.filling import fill, lower_bound_us
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile


def end_us(plan: Plan, profile: Profile, *, self_conditioned: bool = False) -> int:
    return simulate(plan, schedule_of(plan, self_conditioned=self_conditioned), profile).end_us


def all_leftover(plan: Plan, profile: Profile) -> Plan:
    """Every device encodes everything after its last op."""
    fills = tuple(
        Fill(
            device=d,
            after=order[-1],
            component=c.name,
            start=0,
            stop=len(c.layers),
            first=0,
            last=plan.batch_size,
        )
        for d, order in enumerate(schedule_of(plan).orders)
        for c in profile.graph.frozen
    )
    return replace(plan, fills=fills)


def check_fills(plan: Plan, profile: Profile, *, self_conditioned: bool = False) -> None:
    """Coverage exactly once, in an order in which every input exists for every sample.

    What a device encodes of another one's samples it encodes from their batch fields on.
    """
    graph = profile.graph
    schedule = schedule_of(plan, self_conditioned=self_conditioned)
    fills = [f for f in plan.fills if f.self_conditioned == self_conditioned]
    runs = [0] * plan.num_devices
    for device, order in enumerate(schedule.orders):
        mine = [f for f in fills if f.device == device]
        slots = [-1 if f.after is None else order.index(f.after) for f in mine]
        assert slots == sorted(slots)
        encoded: set[tuple[int, int, int]] = {
            (home, v, i)
            for home in range(plan.num_devices)
            for v in graph.inputs
            for i in range(plan.batch_size)
        }
        for f in mine:
            layers = graph.component(f.component).layers
            for node, i in itertools.product(layers[f.start : f.stop], range(f.first, f.last)):
                assert all((f.home, v, i) in encoded for v in node.reads)
                assert all((f.home, v, i) not in encoded for v in node.writes)
                encoded |= {(f.home, v, i) for v in node.writes}
                runs[f.home] += 1
    assert set(runs) == {plan.batch_size * sum(len(c.layers) for c in graph.frozen)}
    encoders(fills, (plan.batch_size,) * plan.num_devices)  # refuses a sample with two encoders


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    times = st.integers(1, 300)
    fixed_us = draw(st.sampled_from([0, 0, 300]))
    text = tuple(draw(st.lists(times, min_size=1, max_size=6)))
    vae = tuple(draw(st.lists(times, min_size=1, max_size=3)))
    return model_profile(
        draw(st.lists(times, min_size=4, max_size=8)),
        skips=draw(st.sampled_from([(), ((0, 3),)])),
        frozen=(
            FrozenChain(name="text", forward_us=text, fixed_us=fixed_us),
            FrozenChain(name="vae", forward_us=vae, fixed_us=fixed_us),
            FrozenChain(name="noise", forward_us=(1, 2), after=("vae",)),
            FrozenChain(name="locked", forward_us=(20,), after=("noise", "text")),
        ),
        feedback=True,
        optimizer_us=draw(st.sampled_from([0, 40])),
        overhead_us=draw(st.sampled_from([0, 500])),
        fill_us=draw(st.sampled_from([0, 40])),
        p2p=Link(latency_us=draw(st.sampled_from([0, 30])), bytes_per_s=10**9, host_us=5),
    )


@settings(deadline=None, max_examples=60)
@given(
    profile=profiles(),
    num_stages=st.integers(1, 4),
    batch_size=st.sampled_from([3, 8, 16]),
    num_microbatches=st.integers(1, 6),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    num_groups=st.integers(1, 2),
)
def test_all_frozen_work_is_covered_once_in_order_and_the_end_only_gets_earlier(
    profile: Profile,
    num_stages: int,
    batch_size: int,
    num_microbatches: int,
    schedule: str,
    num_groups: int,
) -> None:
    num_microbatches = min(num_microbatches, batch_size * num_stages)
    plan = make_plan(
        profile,
        world_size=num_stages * num_groups,
        num_stages=num_stages,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
    )
    for variant in (False, True):
        check_fills(plan, profile, self_conditioned=variant)
        filled_us = end_us(plan, profile, self_conditioned=variant)
        unfilled_us = end_us(replace(plan, fills=()), profile, self_conditioned=variant)
        bound_us = lower_bound_us(plan, profile, self_conditioned=variant)
        assert bound_us <= filled_us <= unfilled_us
        chosen = schedule_of(plan, self_conditioned=variant)
        still = fill(plan, chosen, profile, self_conditioned=variant, move=False)
        still_us = end_us(replace(plan, fills=still), profile, self_conditioned=variant)
        assert filled_us <= still_us, "moving samples only helps"
    assert end_us(plan, profile) <= end_us(all_leftover(plan, profile), profile)


@pytest.mark.parametrize("num_microbatches", [2, 4])
@pytest.mark.parametrize("rho", [0.3, 0.4, 0.5, 0.6])
@pytest.mark.parametrize("batch_size", [32, 64])
def test_balanced_two_stages_reach_95_percent_of_the_cap(
    num_microbatches: int, rho: float, batch_size: int
) -> None:
    trained_us = 8 * 3 * 200  # per sample
    text_us = round(rho * trained_us / 6)
    frozen = (
        FrozenChain(name="text", forward_us=(text_us,) * 6),
        FrozenChain(name="noise", forward_us=(1, 1)),
    )
    profile = model_profile([200] * 8, frozen=frozen)
    plan = make_plan(
        profile, world_size=2, batch_size=batch_size, num_microbatches=num_microbatches
    )
    rho = (6 * text_us + 2) / trained_us
    beta = 1 / num_microbatches
    cap = (1 + beta + rho) / max(1 + rho, 1 + beta)
    speedup = end_us(replace(plan, fills=()), profile) / end_us(plan, profile)
    assert 0.95 * cap <= speedup <= 1.001 * cap
    # The last stage's bubble before its first op is used, for the next batch's first layers.
    assert any(f.device == 1 and f.after is None for f in plan.fills)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (4, 4), (4, 16), (8, 16)])
def test_the_end_is_near_the_lower_bound_with_small_batch_inefficiency(
    num_stages: int, num_microbatches: int
) -> None:
    rng = random.Random(num_stages + num_microbatches)
    for _ in range(5):
        frozen = (
            FrozenChain(
                name="text",
                forward_us=tuple(rng.randint(20, 200) for _ in range(8)),
                fixed_us=500,
            ),
            FrozenChain(name="vae", forward_us=(500, 300, 700), fixed_us=500),
        )
        profile = model_profile([rng.randint(100, 500) for _ in range(16)], frozen=frozen)
        plan = make_plan(
            profile, world_size=num_stages, batch_size=32, num_microbatches=num_microbatches
        )
        assert end_us(plan, profile) <= 1.03 * lower_bound_us(plan, profile)


@pytest.mark.parametrize("seed", range(6))
def test_no_placement_of_a_small_problem_beats_it_by_more_than_one_sample(seed: int) -> None:
    rng = random.Random(seed)
    cost_us = rng.randint(100, 2000)
    profile = model_profile(
        [rng.randint(100, 900), rng.randint(100, 900)],
        frozen=(FrozenChain(name="text", forward_us=(cost_us,)),),
        width=0,
    )
    plan = make_plan(profile, world_size=2, batch_size=3, num_microbatches=2, fill=False)
    schedule = schedule_of(plan)
    found = fill(plan, schedule, profile, move=False)
    best = min(
        simulate(replace(plan, fills=fills), schedule, profile).end_us
        for fills in all_placements(plan)
    )
    assert best <= simulate(replace(plan, fills=found), schedule, profile).end_us <= best + cost_us


def all_placements(plan: Plan) -> list[tuple[Fill, ...]]:
    """Every way to run one frozen layer sample by sample between the ops of two devices."""
    per_device = [
        [
            tuple(
                Fill(device=d, after=slot, component="text", start=0, stop=1, first=i, last=i + 1)
                for i, slot in enumerate(slots)
            )
            for slots in itertools.combinations_with_replacement((None, *order), plan.batch_size)
        ]
        for d, order in enumerate(schedule_of(plan).orders)
    ]
    return [a + b for a, b in itertools.product(*per_device)]


def test_without_slack_to_give_no_op_starts_later_than_unfilled() -> None:
    frozen = (FrozenChain(name="text", forward_us=(50, 50)),)
    profile = model_profile([400] * 4, frozen=frozen, width=0)
    plan = make_plan(profile, world_size=2, batch_size=32, num_microbatches=4)
    filled = simulate(plan, schedule_of(plan), profile)
    bare_profile = model_profile([400] * 4, width=0)
    bare = simulate(replace(plan, fills=()), schedule_of(plan), bare_profile)
    assert [s for s in filled.spans if s.op] == [s for s in bare.spans if s.op]
    assert filled.end_us == bare.end_us


def test_ops_with_slack_may_wait_when_that_ends_the_iteration_earlier() -> None:
    # Device 0 idles 24 ms before its first B and 12 ms before its second. The two layers take 20
    # and 14 ms: 7 ms would be left over, but the first B may wait for 12 ms, so all fits before it.
    profile = model_profile(
        [6000, 6000], frozen=(FrozenChain(name="text", forward_us=(10000, 7000)),), width=0
    )
    plan = make_plan(profile, world_size=2, batch_size=2, num_microbatches=2)
    assert end_us(plan, profile) == 3 * 2 * 18000, "the end of the pipeline without frozen work"
    assert [(f.after, f.start, f.stop, f.first, f.last) for f in plan.fills if f.device == 0] == [
        (Op.parse("0F1"), 0, 2, 0, 2)
    ]


@settings(deadline=None, max_examples=30)
@given(profile=profiles(), num_stages=st.integers(1, 4), num_microbatches=st.integers(1, 6))
def test_without_partial_batches_every_layer_runs_once_on_the_whole_local_batch(
    profile: Profile, num_stages: int, num_microbatches: int
) -> None:
    plan = make_plan(
        profile,
        world_size=num_stages,
        batch_size=8,
        num_microbatches=num_microbatches,
        fill="whole",
    )
    assert {(f.first, f.last) for f in plan.fills} == {(0, 8)}
    for variant in (False, True):
        check_fills(plan, profile, self_conditioned=variant)
        unfilled_us = end_us(replace(plan, fills=()), profile, self_conditioned=variant)
        assert end_us(plan, profile, self_conditioned=variant) <= unfilled_us


def test_a_layer_longer_than_every_bubble_needs_partial_batches() -> None:
    # Device 1 idles 30 ms before its first F and ends its last B at 210 ms; the layer takes 160 ms,
    # 40 ms a sample. Two samples in front leave no idle time: 2 (F + B) + 160.
    profile = model_profile(
        [7500, 7500], frozen=(FrozenChain(name="text", forward_us=(40_000,)),), width=0
    )
    ends_us = [
        end_us(
            make_plan(profile, world_size=2, batch_size=4, num_microbatches=2, fill=fill), profile
        )
        for fill in ("whole", "auto")
    ]
    assert ends_us == [210_000 + 160_000, 2 * 90_000 + 160_000]


def test_where_starting_a_fill_is_dear_there_are_fewer_and_the_simulator_charges_each() -> None:
    frozen = (FrozenChain(name="text", forward_us=(300, 200, 250, 150)),)
    cheap = model_profile([400] * 4, frozen=frozen, width=0)
    dear = replace(cheap, fill_us=20_000)
    plan = make_plan(cheap, world_size=2, batch_size=16, num_microbatches=4)
    fewer = make_plan(dear, world_size=2, batch_size=16, num_microbatches=4)
    assert len(plan.fills) > len(fewer.fills) == 2, "one for each device's component"
    wanted = sum(
        dear.fill_us + dear.forward_us("text", f.start, f.stop, f.last - f.first)
        for f in plan.fills
    )
    timeline = simulate(plan, schedule_of(plan), dear)
    assert timeline.total_us(Activity.FROZEN) == wanted
    assert end_us(fewer, dear) < end_us(plan, dear)


def test_layers_of_one_sample_range_make_one_fill() -> None:
    profile = model_profile([500] * 2, frozen=(FrozenChain(name="text", forward_us=(10,) * 6),))
    plan = make_plan(profile, world_size=2, batch_size=8, num_microbatches=2)
    assert all((f.start, f.stop, f.first, f.last) == (0, 6, 0, 8) for f in plan.fills), (
        "all of it fits into the first bubble of each device"
    )
    assert len(plan.fills) == 2


def test_fills_are_the_same_every_time_and_empty_without_frozen_components() -> None:
    profile = model_profile([70] * 6, frozen=(FrozenChain(name="text", forward_us=(31, 17)),))
    plan = make_plan(profile, world_size=3, batch_size=9, fill=False)
    schedule = schedule_of(plan)
    assert fill(plan, schedule, profile) == fill(plan, schedule, profile)
    bare = model_profile([70] * 6)
    assert fill(plan, schedule, bare) == ()


@pytest.mark.parametrize("seed", range(4))
def test_the_overhead_of_an_iteration_changes_no_fill(seed: int) -> None:
    rng = random.Random(seed)
    frozen = (FrozenChain(name="text", forward_us=tuple(rng.choices(range(20, 200), k=5))),)
    times = rng.choices(range(50, 400), k=8)
    bare = model_profile(times, frozen=frozen)
    late = model_profile(times, frozen=frozen, overhead_us=10**6)
    options = {"world_size": 4, "batch_size": 8, "num_microbatches": 8}
    plan, shifted = make_plan(bare, **options), make_plan(late, **options)
    assert shifted.fills == plan.fills
    assert end_us(shifted, late) == end_us(plan, bare) + 10**6


def test_the_lower_bound_is_the_critical_path_or_the_most_loaded_device() -> None:
    light = model_profile([10, 10], frozen=(FrozenChain(name="t", forward_us=(1,)),), width=0)
    plan = make_plan(light, world_size=2, batch_size=4, num_microbatches=2)
    assert lower_bound_us(plan, light) == 3 * 4 * 30  # (M+S-1) x 4 samples x (F+B)
    heavy = model_profile([10, 10], frozen=(FrozenChain(name="t", forward_us=(100,)),), width=0)
    assert lower_bound_us(plan, heavy) == 2 * 4 * 30 + 4 * 100

"""Two or more backbones on one pipeline: who sits where, and that plans of them are filled."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from brute import random_profile

from lightning_dpipe.core.errors import PlanError, ScheduleError
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.planning.explain import explain
from lightning_dpipe.planning.filling import lower_bound_us
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.check import check_programs, check_schedule
from lightning_dpipe.simulation.memory import peak_bytes
from lightning_dpipe.simulation.render import ascii_chart
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile, pair_profile


def profile(*, feedback: bool = False) -> Profile:
    """Four even layers, and six of which the last four weigh as much as the first two."""
    base = model_profile(
        [100, 100, 100, 100], frozen=(FrozenChain(name="text", forward_us=(30, 30)),)
    )
    fine = model_profile([200, 200, 100, 100, 100, 100], feedback=feedback)
    return pair_profile(base, fine)


def test_backbones_are_cut_alike_and_go_down_and_up() -> None:
    plan = make_plan(profile(), world_size=2, batch_size=8)
    found = [(s.backbone, s.start, s.stop, s.devices) for s in plan.stages]
    assert found == [
        ("net0", 0, 2, (0,)),
        ("net0", 2, 4, (1,)),
        ("net1", 0, 2, (1,)),
        ("net1", 2, 6, (0,)),
    ]
    # 16 samples in 8 micro-batches; backward is twice the forward.
    assert plan.lengths == ((400, 800), (400, 800), (800, 1600), (800, 1600))
    assert from_data(Plan, to_data(plan)) == plan


def test_every_other_backbone_goes_up() -> None:
    three = pair_profile(model_profile([1, 1]), model_profile([1, 1]), model_profile([1, 1]))
    plan = make_plan(three, world_size=4, num_stages=2, batch_size=4)
    assert [s.devices for s in plan.stages] == [(0,), (1,), (1,), (0,), (0,), (1,)]
    assert plan.groups == ((1, 0), (3, 2))
    assert plan.replica_sets == ((1, 3), (0, 2))


def test_explicit_cuts_are_given_by_backbone() -> None:
    cuts = {"net0": (1, 2), "net1": (2, 5)}
    plan = make_plan(profile(), world_size=3, batch_size=4, cuts=cuts)
    assert [(s.start, s.stop) for s in plan.stages] == [
        (0, 1), (1, 2), (2, 4), (0, 2), (2, 5), (5, 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ((1,), r"cuts=\(1,\) for a model with 2 backbones \(net0, net1\)"),
        ({"net0": (1,)}, "cuts are given for net0, the backbones are net0, net1"),
        ({"net0": (1,), "net1": (1, 2)}, r"cuts make \[2, 3\] stages"),
        ({"net0": (1,), "net1": (6,)}, "do not cut 6 layers into 2 stages"),
    ],
)
def test_cuts_that_do_not_fit_the_backbones_are_refused(cuts, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(profile(), world_size=2, batch_size=4, cuts=cuts)


def test_fills_cover_the_frozen_work_of_all_backbones_and_shorten_the_iteration() -> None:
    both = profile()
    plan = make_plan(both, world_size=4, batch_size=8, num_microbatches=2)
    covered = {
        (f.home, f.component, layer, row)
        for f in plan.fills
        for layer in range(f.start, f.stop)
        for row in range(f.first, f.last)
    }
    assert len(covered) == 4 * 2 * 8  # devices, layers, rows
    filled = simulate(plan, schedule_of(plan), both)
    bare = simulate(replace(plan, fills=()), schedule_of(plan), both)
    assert lower_bound_us(plan, both) <= filled.end_us < bare.end_us
    assert filled.fill_ratio > 0.9


def test_only_the_backbone_that_reads_the_estimate_runs_twice() -> None:
    both = profile(feedback=True)
    plan = make_plan(both, world_size=2, batch_size=4)
    assert plan.conditioned == "net1"
    assert {f.self_conditioned for f in plan.fills} == {False, True}
    schedule = schedule_of(plan, self_conditioned=True)
    swept = {op.stage for order in schedule.orders for op in order if op.kind is OpKind.S}
    assert swept == {2, 3}
    check_schedule(schedule, plan, both.graph, self_conditioned=True)
    with pytest.raises(ScheduleError, match="says that None is self-conditioned"):
        schedule_of(replace(plan, conditioned=None), self_conditioned=True)


def test_one_device_runs_all_backbones_one_microbatch_after_the_other() -> None:
    both = profile(feedback=True)
    plan = make_plan(both, world_size=1, batch_size=2, num_microbatches=2)
    order = " ".join(map(str, schedule_of(plan).orders[0]))
    assert order == "0F0 0B0 1F0 1B0 0F1 0B1 1F1 1B1"
    swept = schedule_of(plan, self_conditioned=True)
    assert str(swept).endswith("1S0 1S1 " + order)
    check_schedule(swept, plan, both.graph, self_conditioned=True)


def test_a_device_holds_the_weights_and_activations_of_both_backbones() -> None:
    """By hand: two layers a stage; 4 samples a micro-batch; 32 bytes a sample and layer."""
    both = pair_profile(
        model_profile([1] * 4, trained_bytes=1000), model_profile([1] * 4, trained_bytes=500)
    )
    plan = make_plan(both, world_size=2, batch_size=6, num_microbatches=3)
    schedule = Schedule.parse(
        "0F0 0F1 3F0 3B0 0B0 0F2 3F1 3B1 0B1 3F2 3B2 0B2\n"
        "2F0 1F0 1B0 2B0 2F1 1F1 1B1 2B1 2F2 1F2 1B2 2B2"
    )
    resident = 4 * 2 * (1000 + 500)
    microbatch = 2 * 4 * 32
    assert peak_bytes(plan, schedule, both) == (
        resident + 3 * microbatch,
        resident + 2 * microbatch,
    )


def test_pictures_and_tables_name_the_stages_of_both() -> None:
    both = profile()
    plan = make_plan(both, world_size=2, batch_size=8, num_microbatches=2)
    chart = ascii_chart(simulate(plan, schedule_of(plan), both), width=120)
    assert "0F0" in chart.splitlines()[1]
    assert "3B1" in chart.splitlines()[1]
    assert "2F0" in chart.splitlines()[2]
    rows = explain(plan, both).splitlines()[1:5]
    named = ["net0.layer0", "net0.layer2", "net1.layer0", "net1.layer2"]
    assert all(name in row for name, row in zip(named, rows, strict=True))


def test_a_plan_whose_lengths_miss_a_stage_is_refused() -> None:
    plan = make_plan(profile(), world_size=2, batch_size=8)
    with pytest.raises(PlanError, match="3 pairs of lengths for 4 stages"):
        replace(plan, lengths=plan.lengths[:3])


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_random_pairs_are_legal_filled_once_and_no_shorter_than_the_bound(seed) -> None:
    draw = random.Random(seed)
    conditioned = draw.choice([None, 0, 1])
    both = pair_profile(
        *(
            random_profile(draw, draw.randint(3, 7), frozen=i == 0, feedback=i == conditioned)
            for i in range(2)
        )
    )
    devices = draw.randint(1, 3)
    groups, batch = draw.choice([1, 2]), draw.randint(1, 6)
    plan = make_plan(
        both, world_size=devices * groups, num_stages=devices, batch_size=batch,
        num_microbatches=draw.randint(1, batch * devices),
        schedule=draw.choice(["1f1b", "gpipe"]),
    )  # fmt: skip
    for variant in (False, True) if conditioned is not None else (False,):
        schedule = schedule_of(plan, self_conditioned=variant)
        check_schedule(schedule, plan, both.graph, self_conditioned=variant)
        sizes = (batch,) * devices
        for encoded in (False, True):
            shape = StepShape(
                sizes=sizes, next_sizes=sizes, encoded=encoded, self_conditioned=variant
            )
            check_programs(lower(plan, schedule, both.graph, shape))
        least = lower_bound_us(plan, both, self_conditioned=variant)
        assert simulate(plan, schedule, both).end_us >= least
        work = Counter(
            (f.home, f.component, layer, row)
            for f in plan.fills
            if f.self_conditioned == variant
            for layer in range(f.start, f.stop)
            for row in range(f.first, f.last)
        )
        assert set(work.values()) == {1}
        assert len(work) == devices * batch * sum(len(c.layers) for c in both.graph.frozen)

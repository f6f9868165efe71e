from typing import Any

import pytest

from lightning_dpipe.core.errors import PlanError, ScheduleError
from lightning_dpipe.core.jsonio import digest, from_data, to_data
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from synthetic import FrozenChain, model_profile

FROZEN = (FrozenChain(name="text", forward_us=(30, 30)),)


def profile(*, feedback: bool = False) -> Profile:
    return model_profile([100, 100, 100, 100, 50, 50], frozen=FROZEN, feedback=feedback)


def test_defaults_are_one_stage_a_rank_and_four_microbatches_a_stage_capped_by_the_batch() -> None:
    plan = make_plan(profile(), world_size=2, batch_size=16)
    assert [(s.start, s.stop, s.devices) for s in plan.stages] == [(0, 2, (0,)), (2, 6, (1,))]
    assert (plan.num_microbatches, plan.schedule) == (8, "1f1b")
    assert make_plan(profile(), world_size=2, batch_size=3).num_microbatches == 6
    assert (plan.graph_digest, plan.profile_digest) == (
        digest(profile().graph),
        digest(profile()),
    )


def test_global_rank_0_is_the_last_stage_and_replicas_are_consecutive_ranks() -> None:
    plan = make_plan(profile(), world_size=4, num_stages=2, batch_size=8)
    assert plan.groups == ((1, 0), (3, 2))


def test_a_plan_survives_json_and_is_the_same_every_time() -> None:
    plan = make_plan(profile(feedback=True), world_size=3, batch_size=8)
    assert plan.fills
    assert from_data(Plan, to_data(plan)) == plan
    assert make_plan(profile(feedback=True), world_size=3, batch_size=8) == plan


def test_both_variants_are_filled_when_the_model_feeds_back() -> None:
    assert {f.self_conditioned for f in make_plan(profile(), world_size=2, batch_size=8).fills} == {
        False
    }
    plan = make_plan(profile(feedback=True), world_size=2, batch_size=8)
    assert {f.self_conditioned for f in plan.fills} == {False, True}
    kinds = {op.kind for o in schedule_of(plan, self_conditioned=True).orders for op in o}
    assert kinds == {OpKind.S, OpKind.F, OpKind.B}


def test_fill_can_be_switched_off() -> None:
    assert make_plan(profile(), world_size=2, batch_size=8, fill=False).fills == ()


def test_explicit_cuts_are_taken_and_give_the_number_of_stages() -> None:
    plan = make_plan(profile(), world_size=6, batch_size=8, cuts=(1, 2))
    assert [(s.start, s.stop) for s in plan.stages] == [(0, 1), (1, 2), (2, 6)]
    assert len(plan.groups) == 2


@pytest.mark.parametrize("cuts", [(0, 3), (3, 3), (4, 2), (3, 6), (3,)])
def test_cuts_that_leave_a_stage_empty_or_do_not_fit_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"do not cut 6 layers into 3 stages"):
        make_plan(profile(), world_size=3, num_stages=3, batch_size=8, cuts=cuts)


def test_a_world_that_the_stages_do_not_divide_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"5 ranks cannot form pipelines of 2 devices"):
        make_plan(profile(), world_size=5, num_stages=2, batch_size=8)


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"7 stages cannot be cut from the 6 layers"):
        make_plan(profile(), world_size=7, batch_size=8)


@pytest.mark.parametrize("num_microbatches", [9, 0])
def test_a_batch_smaller_than_the_microbatches_is_refused_with_both_numbers(
    num_microbatches: int,
) -> None:
    with pytest.raises(
        PlanError,
        match=rf"num_microbatches={num_microbatches} for a pipeline's batch of 8 samples",
    ):
        make_plan(profile(), world_size=2, batch_size=4, num_microbatches=num_microbatches)


@pytest.mark.parametrize("fill", [False, True])
def test_an_unknown_schedule_is_refused(fill: bool) -> None:
    with pytest.raises(ScheduleError, match=r"unknown schedule 'zb'"):
        make_plan(profile(), world_size=2, batch_size=4, schedule="zb", fill=fill)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_stages": "2"}, "num_stages='2'; give a whole number"),
        ({"num_stages": 1.5}, r"num_stages=1\.5; give a whole number"),
        ({"num_microbatches": "all"}, "num_microbatches='all'; give a whole number"),
        ({"num_microbatches": 9, "num_stages": "auto"}, "all 2 ranks together have 8 samples"),
        ({"num_microbatches": 0, "num_stages": "auto"}, "choose 1 <= num_microbatches <= 8"),
        ({"cuts": 3}, r"cuts=3; give the first layer of every stage but the first, as in \[3, 7\]"),
        ({"cuts": "3"}, "cuts='3'; give the first layer"),
        ({"cuts": (1.5,)}, "give the first layer"),
        ({"cuts": {"net": 3}}, "give the first layer"),
        ({"world_size": 0}, "a plan for 0 ranks with 4 samples each"),
        ({"batch_size": -1}, "a plan for 2 ranks with -1 samples each"),
        ({"probability": float("nan")}, "probability=nan of self-conditioning"),
    ],
)
def test_what_is_no_number_of_anything_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(profile(), **({"world_size": 2, "batch_size": 4} | given))

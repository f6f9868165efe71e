"""Calibration: a profile corrected by a timeline predicts that timeline."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.fleet import fleet
from lightning_dpipe.core.profile import ComponentCost, Profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.profiling.calibrate import calibrate, typical
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile


def example() -> Profile:
    text = FrozenChain(name="text", forward_us=(40, 60, 30))
    return model_profile((100, 120, 90, 110), frozen=(text,))


def slowed(cost: ComponentCost, forward: int, backward: int) -> ComponentCost:
    layers = tuple(
        replace(
            layer,
            forward_us=tuple(forward * x for x in layer.forward_us),
            backward_us=tuple(backward * x for x in layer.backward_us),
            input_grad_us=tuple(backward * x for x in layer.input_grad_us),
        )
        for layer in cost.layers
    )
    return replace(cost, layers=layers)


def test_a_device_that_is_slower_than_profiled_is_learnt_from_one_timeline() -> None:
    profile = example()
    plan = make_plan(profile, world_size=2, batch_size=8, num_microbatches=4)
    real = replace(profile, costs=tuple(slowed(c, 2, 3) for c in profile.costs))
    measured = simulate(plan, schedule_of(plan), real)
    learnt = calibrate(profile, plan, [measured])
    again = simulate(plan, schedule_of(plan), learnt)
    assert abs(again.end_us - measured.end_us) <= 0.001 * measured.end_us


def test_frozen_layers_are_learnt_apart_from_what_starting_a_fill_costs() -> None:
    profile = replace(example(), fill_us=70)
    plan = make_plan(profile, world_size=2, batch_size=8, num_microbatches=4)
    real = replace(profile, costs=tuple(slowed(c, 2, 3) for c in profile.costs))
    learnt = calibrate(profile, plan, [simulate(plan, schedule_of(plan), real)])
    assert learnt.fill_us == 70
    assert learnt.component("text") == real.component("text")


def test_what_did_not_run_keeps_its_times() -> None:
    profile = example()
    plan = make_plan(profile, world_size=2, batch_size=8, num_microbatches=4)
    assert calibrate(profile, plan, []) == profile


def test_devices_of_several_kinds_learn_from_their_own_spans_and_shares() -> None:
    profile = fleet([example(), replace(example(), device="other")], (0, 1))
    plan = make_plan(profile, world_size=2, batch_size=8, num_stages=1)
    plan = replace(plan, stages=(replace(plan.stages[0], shares=(3, 5)),))
    first, second = (
        replace(example(), costs=tuple(slowed(c, *by) for c in example().costs))
        for by in ((2, 3), (5, 4))
    )
    real = fleet([first, second], (0, 1))
    measured = simulate(plan, schedule_of(plan), real)
    learnt = calibrate(profile, plan, [measured])
    again = simulate(plan, schedule_of(plan), learnt)
    assert abs(again.end_us - measured.end_us) <= 0.001 * measured.end_us
    for rank, known in enumerate((first, second)):
        for what in ("forward_us", "backward_us"):
            wanted = getattr(known, what)("net", 0, 4, 6)
            assert getattr(learnt.on(rank), what)("net", 0, 4, 6) == pytest.approx(wanted, rel=0.01)


def test_a_long_tail_counts_and_a_hiccup_counts_as_twice_the_median() -> None:
    assert typical([100, 100, 160]) == 120
    assert typical([100, 100, 9_000]) == pytest.approx(400 / 3)

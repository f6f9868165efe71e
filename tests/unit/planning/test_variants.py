"""Self-conditioned steps in the objective."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import (
    expected_bound_us,
    expected_us,
    filler_of,
    variants_of,
)
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile

FROZEN = (FrozenChain(name="vae", forward_us=(30, 40)),)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_the_expected_iteration_is_the_mean_over_both_schedules(probability: float) -> None:
    profile = model_profile([100] * 4, frozen=FROZEN, feedback=True)
    plan = make_plan(profile, world_size=2, batch_size=8, num_microbatches=4)
    plain, conditioned = (
        simulate(plan, schedule_of(plan, self_conditioned=s), profile).end_us for s in (False, True)
    )
    assert plain < conditioned
    mean = (1 - probability) * plain + probability * conditioned
    assert expected_us(plan, profile, probability) == pytest.approx(mean)
    assert expected_bound_us(plan, profile, probability) <= mean
    unfilled = expected_bound_us(plan, profile, probability, filled=None)
    assert unfilled == expected_us(replace(plan, fills=()), profile, probability)


def test_a_model_without_feedback_has_one_variant() -> None:
    graph = model_profile([1]).graph
    assert variants_of(graph, 0.5) == ((False, 1.0),)
    assert variants_of(model_profile([1], feedback=True).graph, 0.25) == (
        (False, 0.75),
        (True, 0.25),
    )


def test_fillers_are_named_and_others_refused() -> None:
    assert [filler_of(x) for x in (True, False)] == ["auto", None]
    assert [filler_of(x) for x in ("auto", "whole", "paper")] == ["auto", "whole", "paper"]
    with pytest.raises(PlanError, match=r"unknown fill='best'; choose True, False or one of auto"):
        filler_of("best")

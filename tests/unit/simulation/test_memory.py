"""Peak memory against sums done by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.simulation.memory import peak_bytes
from synthetic import FrozenChain, model_profile

WEIGHTS = 1000
ACTIVATION = 32  # bytes a sample and layer, as in the synthetic profile (8 floats)


def plan_of(profile: Profile, *, recompute: bool = False, num_microbatches: int = 3) -> Plan:
    """Two stages of two layers, 4 samples a micro-batch."""
    return Plan(
        graph_digest="",
        profile_digest="",
        groups=((1, 0),),
        stages=tuple(
            Stage(backbone="net", start=2 * d, stop=2 * d + 2, devices=(d,), recompute=recompute)
            for d in range(2)
        ),
        num_microbatches=num_microbatches,
        batch_size=2 * num_microbatches,
        schedule="test",
    )


def profile_of(**options: object) -> Profile:
    return model_profile((1, 1, 1, 1), trained_bytes=WEIGHTS, **options)  # type: ignore[arg-type]


RESIDENT = 2 * WEIGHTS * 4  # two layers: weights, gradients, two moments
MICROBATCH = 2 * 4 * ACTIVATION  # two layers, four samples


def test_1f1b_keeps_fewer_microbatches_on_the_last_stage_than_gpipe() -> None:
    profile = profile_of()
    one_f_one_b = Schedule.parse("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    gpipe = Schedule.parse("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")
    plan = plan_of(profile)
    assert peak_bytes(plan, one_f_one_b, profile) == (
        RESIDENT + 2 * MICROBATCH,
        RESIDENT + MICROBATCH,
    )
    assert peak_bytes(plan, gpipe, profile) == (RESIDENT + 3 * MICROBATCH,) * 2


def test_split_backward_keeps_activations_until_the_weight_gradient() -> None:
    profile = profile_of()
    schedule = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2\n1F0 1B0 1F1 1B1 1F2 1B2")
    assert peak_bytes(plan_of(profile), schedule, profile)[0] == RESIDENT + 2 * MICROBATCH


def test_an_input_gradient_without_weight_gradient_ends_the_microbatch() -> None:
    profile = profile_of()
    schedule = Schedule.parse("0F0 0I0 0F1 0I1 0F2 0I2\n1F0 1B0 1F1 1B1 1F2 1B2")
    assert peak_bytes(plan_of(profile), schedule, profile)[0] == RESIDENT + MICROBATCH


def test_self_conditioning_forwards_keep_nothing() -> None:
    profile = profile_of(feedback=True)
    plain = Schedule.parse("0F0 0B0\n1F0 1B0")
    twice = Schedule.parse("0S0 0F0 0B0\n1S0 1F0 1B0")
    plan = plan_of(profile, num_microbatches=1)
    assert peak_bytes(plan, twice, profile) == peak_bytes(plan, plain, profile)


def test_every_device_holds_every_frozen_component() -> None:
    plain = profile_of()
    encoders = profile_of(frozen=(FrozenChain(name="vae", forward_us=(5, 5)),))
    heavy = tuple(
        replace(cost, layers=tuple(replace(x, param_bytes=700) for x in cost.layers))
        if cost.name == "vae"
        else cost
        for cost in encoders.costs
    )
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    plan = plan_of(plain, num_microbatches=1)
    without = peak_bytes(plan, schedule, plain)
    assert peak_bytes(plan, schedule, replace(encoders, costs=heavy)) == tuple(
        b + 1400 for b in without
    )


def test_recompute_keeps_inputs_and_adds_one_microbatch_of_activations() -> None:
    profile = profile_of()
    schedule = Schedule.parse("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")
    found = peak_bytes(plan_of(profile, recompute=True), schedule, profile)
    one_value = 4 * ACTIVATION  # a synthetic value has the size of a layer's activations
    # Stage 0 reads the batch field x; stage 1 reads h1, and x for the loss.
    assert found == (
        RESIDENT + 3 * one_value + MICROBATCH,
        RESIDENT + 3 * 2 * one_value + MICROBATCH,
    )


def test_uneven_microbatches_count_their_own_samples() -> None:
    profile = profile_of()
    plan = replace(plan_of(profile, num_microbatches=3), batch_size=5)  # 10 samples: 4, 3, 3
    schedule = Schedule.parse("0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1F1 1B0 1B1 1F2 1B2")
    layer = 2 * ACTIVATION
    assert peak_bytes(plan, schedule, profile) == (RESIDENT + 4 * layer, RESIDENT + 7 * layer)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 6))
def test_peak_is_the_largest_number_of_open_microbatches(num: int, ahead: int) -> None:
    """Warm up with `ahead` forwards, then alternate: at most ``ahead + 1`` are open."""
    ahead = min(ahead, num)
    order = [f"0F{m}" for m in range(ahead)]
    for m in range(num):
        order += ([f"0F{m + ahead}"] if m + ahead < num else []) + [f"0B{m}"]
    profile = profile_of()
    other = " ".join(f"1F{m} 1B{m}" for m in range(num))
    schedule = Schedule.parse(" ".join(order) + "\n" + other)
    found = peak_bytes(plan_of(profile, num_microbatches=num), schedule, profile)
    assert found[0] == RESIDENT + min(ahead + 1, num) * MICROBATCH


def test_a_component_that_was_not_profiled_is_named() -> None:
    profile = profile_of(frozen=(FrozenChain(name="vae", forward_us=(5,)),))
    lacking = replace(profile, costs=profile.costs[1:])
    with pytest.raises(ValueError, match="component 'vae' is not in the profile"):
        peak_bytes(plan_of(profile), Schedule.parse("0F0 0B0\n1F0 1B0"), lacking)


def test_replicas_of_a_stage_hold_their_share_of_each_microbatch() -> None:
    profile = profile_of()
    plan = replace(
        plan_of(profile, num_microbatches=1),
        groups=((2, 1, 0),),
        batch_size=2,  # one micro-batch of 6 samples
        stages=(
            Stage(backbone="net", start=0, stop=2, devices=(0, 1)),
            Stage(backbone="net", start=2, stop=4, devices=(2,)),
        ),
    )
    schedule = Schedule.parse("0F0 0B0\n0F0 0B0\n1F0 1B0")
    layers = 2 * ACTIVATION
    assert peak_bytes(plan, schedule, profile) == (
        RESIDENT + 3 * layers,
        RESIDENT + 3 * layers,
        RESIDENT + 6 * layers,
    )

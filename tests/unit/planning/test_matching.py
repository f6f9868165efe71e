"""A plan that does not fit says what differs: both digests, both sides."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.matching import (
    check_model,
    check_profile,
    check_profile_of,
    check_run,
)
from lightning_dpipe.planning.search import make_plan
from synthetic import FrozenChain, model_profile

VERSIONS = {"torch": "2.9", "diffusers": "0.35"}


def profile_of(num_layers: int = 6, *, width: int = 8, encoders: int = 1) -> Profile:
    frozen = tuple(FrozenChain(name=f"text{i}", forward_us=(30, 30)) for i in range(encoders))
    return replace(model_profile([100] * num_layers, frozen=frozen, width=width), versions=VERSIONS)


PLAN = make_plan(profile_of(), world_size=2, batch_size=8)


def test_what_fits_passes_searched_or_not() -> None:
    searched = make_plan(profile_of(), world_size=2, batch_size=8, num_stages="auto")
    for plan in (PLAN, searched):
        check_profile(plan, profile_of())
        assert plan.origin is not None
        check_run(plan, device="synthetic", dtype="float32", versions=VERSIONS, batch_size=8)


def test_another_model_is_named_by_digest_and_layers() -> None:
    other = profile_of(8, encoders=2).graph
    with pytest.raises(PlanError) as caught:
        check_model(PLAN, other)
    text = str(caught.value)
    assert f"for graph {PLAN.graph_digest} with 6 layers in net, no text1" in text
    assert f"this model is {digest(other)} with 8 layers in net, 2 layers in text1" in text
    assert text.endswith("plan again")


def test_a_model_with_other_shapes_only_is_told_so() -> None:
    with pytest.raises(PlanError, match="as many layers, but other shapes or reads; plan again"):
        check_model(PLAN, profile_of(width=16).graph)
    with pytest.raises(PlanError, match=PLAN.graph_digest):  # an old file knows its digest only
        check_model(replace(PLAN, origin=None), profile_of(width=16).graph)


def test_a_profile_of_another_model_is_named_too() -> None:
    with pytest.raises(
        PlanError, match=r"with 8 layers in net, this model .* with 6 layers in net"
    ):
        check_profile_of(profile_of(8), profile_of().graph)
    check_profile_of(profile_of(), profile_of().graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "H100"}, "device synthetic there, H100 here"),
        ({"dtype": "bfloat16"}, "dtype float32 there, bfloat16 here"),
        ({"versions": {**VERSIONS, "torch": "3.0"}}, "torch 2.9 there, 3.0 here"),
        ({"versions": {"torch": "2.9"}}, "diffusers 0.35 there, absent here"),
        ({"overhead_us": 9}, "its times, sizes or links are others"),
        ({"estimated": True}, "one is estimated, the other measured"),
    ],
)
def test_another_profile_is_refused_with_what_differs(
    change: dict[str, object], message: str
) -> None:
    other = replace(profile_of(), **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message) as caught:
        check_profile(PLAN, other)
    assert PLAN.profile_digest in str(caught.value)
    assert digest(other) in str(caught.value)


RUN = {"device": "synthetic", "dtype": "float32", "versions": VERSIONS, "batch_size": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "for 8 samples per device, this run has 4"),
        ({"device": "H100"}, "device synthetic there, H100 here"),
        ({"dtype": "bf16-mixed"}, "dtype float32 there, bf16-mixed here"),
        ({"versions": {}}, "torch 2.9 there, absent here"),
    ],
)
def test_another_run_is_refused_with_both_values(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_run(PLAN, **(RUN | change))  # type: ignore[arg-type]


def test_an_estimate_is_for_hardware_that_was_not_there_but_its_batch_counts() -> None:
    estimate = replace(profile_of(), estimated=True)
    plan = make_plan(estimate, world_size=2, batch_size=8)
    check_run(plan, device="H100", dtype="bf16-mixed", versions={}, batch_size=8)
    check_run(plan, device="H100", dtype="bf16-mixed", versions={}, batch_size=None)
    with pytest.raises(PlanError, match="this run has 4"):
        check_run(plan, device="H100", dtype="bf16-mixed", versions={}, batch_size=4)

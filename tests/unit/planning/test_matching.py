"""A plan that does not fit says what differs: both digests, both sides."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edits import edits
from lightning_dpipe.core.errors import DPipeError, PlanError
from lightning_dpipe.core.jsonio import digest, load, to_data
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.planning.matching import (
    check_model,
    check_profile,
    check_profile_of,
    check_run,
)
from lightning_dpipe.planning.search import make_plan, schedule_of
from lightning_dpipe.simulation.check import check_programs, check_schedule
from lightning_dpipe.simulation.memory import peak_bytes
from lightning_dpipe.simulation.simulate import simulate
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


# ---- files that a person has edited


SMALL = model_profile(
    (3, 5),
    frozen=(
        FrozenChain(name="text", forward_us=(4, 2)),
        FrozenChain(name="join", forward_us=(3,), after=("text",)),
    ),
)
SMALL_PLAN = make_plan(SMALL, world_size=2, batch_size=3, num_microbatches=2)


def walk(plan: Plan, profile: Profile) -> None:
    """All that is done with a plan before it runs."""
    check_profile(plan, profile)
    schedule = schedule_of(plan)
    check_schedule(schedule, plan, profile.graph)
    simulate(plan, schedule, profile)
    peak_bytes(plan, schedule, profile)
    sizes = (plan.batch_size,) * plan.num_devices
    check_programs(lower(plan, schedule, profile.graph, StepShape(sizes=sizes, next_sizes=sizes)))


def test_any_edit_of_a_plan_file_leaves_a_plan_that_runs_or_is_refused(tmp_path: Path) -> None:
    path, taken, refused = tmp_path / "plan.json", 0, 0
    walk(SMALL_PLAN, SMALL)
    for what, data in edits(to_data(SMALL_PLAN)):
        path.write_text(json.dumps(data), encoding="utf-8")
        try:
            walk(load(Plan, path), SMALL)
            taken += 1
        except DPipeError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{what}: {error!r} is no error that a user can read") from error
    assert refused > 10 * taken > 100


def test_any_edit_of_a_profile_file_can_be_planned_with_or_is_refused(tmp_path: Path) -> None:
    path, taken, refused = tmp_path / "profile.json", 0, 0
    small = model_profile((3, 5), frozen=(FrozenChain(name="text", forward_us=(4,)),))
    few = tuple(
        replace(
            cost,
            samples=cost.samples[:2],
            layers=tuple(
                replace(
                    layer,
                    forward_us=layer.forward_us[:2],
                    backward_us=layer.backward_us[:2],
                    input_grad_us=layer.input_grad_us[:2],
                    activation_bytes=layer.activation_bytes[:2],
                )
                for layer in cost.layers
            ),
        )
        for cost in small.costs
    )
    for what, data in edits(to_data(replace(small, costs=few, memory_bytes=10**6))):
        path.write_text(json.dumps(data), encoding="utf-8")
        try:
            profile = load(Profile, path)
            walk(make_plan(profile, world_size=2, batch_size=2), profile)
            taken += 1
        except DPipeError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{what}: {error!r} is no error that a user can read") from error
    assert refused > 2 * taken > 100


def test_stages_that_leave_out_or_repeat_layers_are_named() -> None:
    first, second = PLAN.stages
    for stages, there in (
        ((first,), r"0:3"),
        ((first, replace(second, start=2)), r"0:3, 2:6"),
        ((first, replace(second, start=4)), r"0:3, 4:6"),
        ((first, replace(second, stop=7)), r"0:3, 3:7"),
        ((second, first), r"3:6, 0:3"),
    ):
        with pytest.raises(
            PlanError, match=rf"'net' have layers {there}; the backbones are net 0:6"
        ):
            check_model(replace(PLAN, stages=stages), profile_of().graph)
    other = replace(second, backbone="other")
    with pytest.raises(PlanError, match="'other' have layers 3:6"):
        check_model(replace(PLAN, stages=(replace(first, stop=6), other)), profile_of().graph)


def whole(component: str, stop: int, **changes: object) -> Fill:
    fill = Fill(device=0, after=None, component=component, start=0, stop=stop, first=0, last=3)
    return replace(fill, **changes)


def test_fills_encode_each_sample_once_in_a_possible_order() -> None:
    text, join = whole("text", 2), whole("join", 1)

    def check(*fills: Fill) -> None:
        check_model(replace(SMALL_PLAN, fills=fills), SMALL.graph)

    check(text, join)
    check(replace(text, stop=1), replace(text, start=1), join)
    check(replace(text, last=1), replace(text, first=1), join)
    for fills, message in (
        ((text,), "run 0 of 1 layers of 'join' on sample 0 of device 0"),
        ((join, text), "'text' has not written what they read"),
        ((text, text, join), "when 2 of them are done"),
        ((replace(text, stop=1), join), "'text' has not written"),
        ((replace(text, first=1), replace(join, first=1)), "0 of 2 layers of 'text' on sample 0"),
        ((whole("text", 3), join), "layers 0:3 of 'text'; the frozen components are text 0:2"),
        ((whole("net", 2),), "layers 0:2 of 'net'; the frozen components"),
    ):
        with pytest.raises(PlanError, match=message):
            check(*fills)
    with pytest.raises(PlanError, match="comes after 7F0, which is no op of that device"):
        check(replace(text, after=Op.parse("7F0")), join)

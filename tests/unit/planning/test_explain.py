"""What is said about a plan: figures against the simulator, and the sentence for each limit."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.planning.baselines import compare
from lightning_dpipe.planning.explain import Limit, explain, limits, reasons
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.memory import peak_memory
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile, pair_profile

FROZEN = (FrozenChain(name="text", forward_us=(30, 30)),)
LAYERS = [100, 100, 100, 100, 50, 50]


def found(plan: Plan, profile: Profile) -> dict[str, Limit]:
    schedule = schedule_of(plan)
    unfilled = simulate(replace(plan, fills=()), schedule, profile)
    filled = simulate(plan, schedule, profile)
    memory = peak_memory(plan, schedule, profile)
    every = limits(plan, profile, unfilled, filled, memory)
    assert [x.share for x in every] == sorted((x.share for x in every), reverse=True)
    return {x.kind: x for x in every}


def test_explain_names_stages_times_and_the_prediction() -> None:
    profile = model_profile(LAYERS, frozen=FROZEN)
    text = explain(make_plan(profile, world_size=2, batch_size=16), profile)
    lines = text.splitlines()
    # (100 + 100) us x 4 samples; (100 + 100 + 50 + 50) us x 4 samples; 4096 bytes a layer.
    first = ["0", "0:2", "0.80", "ms", "1.60", "ms", "0.01", "MB", "0", "layer0", "..", "layer1"]
    assert lines[1].split() == first
    assert lines[2].split()[:9] == ["1", "2:6", "1.20", "ms", "2.40", "ms", "0.02", "MB", "1"]
    assert "8 micro-batches of 4 samples, global batch 32" in text
    assert "lower bound" in text


def test_bubbles_that_no_frozen_work_fills_are_the_limit() -> None:
    profile = model_profile([100] * 4, width=0)
    plan = make_plan(profile, world_size=4, batch_size=4, num_microbatches=4)
    timeline = simulate(plan, schedule_of(plan), profile)
    bubble = found(plan, profile)["bubble"]
    assert bubble.share == pytest.approx(timeline.bubble_ratio)
    assert bubble.share == pytest.approx(3 / 7, abs=0.01)  # (S - 1) / (M + S - 1)
    assert "the model has no frozen work" in bubble.text


def test_frozen_work_beyond_the_bubbles_is_the_limit() -> None:
    chain = (FrozenChain(name="vae", forward_us=(2000,)),)
    profile = model_profile([100] * 4, frozen=chain, width=0)
    plan = make_plan(profile, world_size=2, batch_size=8)
    timeline = simulate(plan, schedule_of(plan), profile)
    limit = found(plan, profile)["frozen_work"]
    outside = timeline.total_us(Activity.FROZEN) * (1 - timeline.fill_ratio)
    assert limit.share == pytest.approx(outside / (2 * timeline.end_us), abs=1e-3)
    assert "16.00 ms a device" in limit.text  # 8 samples x 2000 us


def test_an_uneven_cut_names_the_slowest_device() -> None:
    profile = model_profile([100, 300], width=0)
    plan = make_plan(profile, world_size=2, batch_size=8)
    limit = found(plan, profile)["slowest_stage"]
    # 300 against a mean of 200 per sample.
    assert "on device 1" in limit.text
    assert "50% above the mean" in limit.text


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"allreduce": Link(latency_us=10_000, bytes_per_s=10**15)}, "sync"),
        ({"p2p": Link(latency_us=3_000, bytes_per_s=10**15)}, "transfer"),
        ({"optimizer_us": 500}, "optimizer"),
        ({"overhead_us": 2_000}, "overhead"),
    ],
)
def test_what_a_device_waits_for_has_its_share(change: dict[str, object], kind: str) -> None:
    profile = model_profile([100] * 4, **change)  # type: ignore[arg-type]
    plan = make_plan(profile, world_size=4, num_stages=2, batch_size=8)
    timeline = simulate(plan, schedule_of(plan), profile)
    activity = {"overhead": Activity.HOST}.get(kind) or Activity(kind)
    limit = found(plan, profile)[kind]
    assert limit.share == pytest.approx(timeline.total_us(activity) / (2 * timeline.end_us))
    assert limit.share > 0.01
    assert kind not in found(plan, model_profile([100] * 4))


def test_small_batches_and_recomputation_are_told_apart() -> None:
    chain = (FrozenChain(name="vae", forward_us=(10,), fixed_us=3000),)
    profile = model_profile([100] * 4, frozen=chain, width=0)
    plan = make_plan(profile, world_size=2, batch_size=8)
    again = replace(plan, stages=tuple(replace(s, recompute=True) for s in plan.stages))
    plain, recomputing = found(plan, profile), found(again, profile)
    assert "recompute" not in plain
    timeline = simulate(again, schedule_of(again), profile)
    forward_us = 4 * 100 * 16  # every layer once more on the pipeline's 16 samples
    assert recomputing["recompute"].share == pytest.approx(forward_us / (2 * timeline.end_us))


def test_a_full_device_is_named_with_both_sizes() -> None:
    profile = model_profile([100] * 4, trained_bytes=2**28)
    plan = make_plan(profile, world_size=2, batch_size=8)
    peak = max(m.total_bytes for m in peak_memory(plan, schedule_of(plan), profile))
    assert "memory" not in found(plan, replace(profile, memory_bytes=2 * peak))
    text = found(plan, replace(profile, memory_bytes=peak))["memory"].text
    assert "2.0 of 2.0 GiB" in text  # 2 layers x 4 x 256 MiB


def test_reasons_name_the_alternatives_and_what_was_given() -> None:
    profile = model_profile([100] * 4, frozen=FROZEN, trained_bytes=2**20)
    slow = replace(profile, allreduce=Link(latency_us=100, bytes_per_s=10**9))
    plan = make_plan(slow, world_size=4, batch_size=8, num_stages=2)
    text = "\n".join(
        reasons(compare(plan, slow), given={"num_stages": 2}, num_plans=None, bound_us=None)
    )
    assert "Given, not chosen: num_stages=2" in text
    assert "than DDP" in text
    assert "DiffusionPipe's own planner" in text
    assert "Filling bubbles makes it" in text
    searched = reasons(compare(plan, slow), given={}, num_plans=7, bound_us=1000.0)
    assert searched[0].startswith("It is the fastest of 7 plans")


def test_data_parallelism_that_does_not_fit_is_said() -> None:
    profile = replace(model_profile([100] * 4, trained_bytes=2**20), memory_bytes=10 * 2**20)
    plan = make_plan(profile, world_size=2, batch_size=8)
    text = reasons(compare(plan, profile), given={}, num_plans=1, bound_us=1.0)
    assert any("Data parallelism does not fit" in line for line in text)


def test_several_backbones_have_limits_and_reasons_too() -> None:
    first = model_profile([100] * 4, frozen=FROZEN, optimizer_us=500)
    pair = pair_profile(first, model_profile([50] * 4))
    plan = make_plan(pair, world_size=2, batch_size=8)
    assert "1.00 ms a device" in found(plan, pair)["optimizer"].text  # 2 of 4 layers
    text = reasons(compare(plan, pair), given={}, num_plans=None, bound_us=None)
    assert any("than DDP" in line for line in text)

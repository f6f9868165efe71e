"""Several stages on one device: data parallelism with early reductions."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from brute import all_recomputes, plan_with, random_profile

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan, Stage, split_sizes
from lightning_dpipe.core.profile import Link
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.planning.auto import Space, search
from lightning_dpipe.planning.buckets import bucket_stages, least_us
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import expected_us
from lightning_dpipe.simulation.check import check_schedule
from lightning_dpipe.simulation.memory import peak_bytes
from pipeline import gather_gradients, run_pipeline
from small import small_batch, small_unet
from synthetic import model_profile


def on_one_device(num_layers: int, cuts: tuple[int, ...]) -> tuple[Stage, ...]:
    return tuple(
        Stage(backbone="net", start=a, stop=b, devices=(0,))
        for a, b in itertools.pairwise((0, *cuts, num_layers))
    )


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_each_microbatch_runs_forward_and_back_before_the_next(
    feedback: bool, num_microbatches: int
) -> None:
    profile = model_profile([1] * 4, skips=((0, 3),), feedback=feedback)
    plan = plan_with(
        on_one_device(4, (2,)), num_groups=2, batch_size=3, num_microbatches=num_microbatches
    )
    schedule = schedule_of(plan, self_conditioned=feedback)
    check_schedule(schedule, plan, profile.graph, self_conditioned=feedback)
    sweep = "".join(f"0S{m} 1S{m} " for m in range(num_microbatches)) if feedback else ""
    steps = " ".join(f"0F{m} 1F{m} 1B{m} 0B{m}" for m in range(num_microbatches))
    assert str(schedule) == f"device 0: {sweep}{steps}"


def test_a_stage_is_reduced_while_those_before_it_run_backward() -> None:
    # F 400, B 800; each half's gradients take 300 us to sum: under B of the other half, then alone.
    profile = model_profile(
        [100] * 4, trained_bytes=150_000, allreduce=Link(latency_us=0, bytes_per_s=10**9), width=0
    )
    one, two = (
        plan_with(on_one_device(4, cuts), num_groups=2, batch_size=1, num_microbatches=1)
        for cuts in ((), (2,))
    )
    assert expected_us(one, profile) == 400 + 800 + 600
    assert expected_us(two, profile) == 400 + 800 + 300
    found = make_plan(profile, world_size=2, batch_size=1, num_stages="auto")
    assert len(found.stages) > 1
    assert found.num_devices == 1


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_beats_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, 5, frozen=False, feedback=seed % 2 == 1)
    num_microbatches, batch_size = rng.randint(1, 3), rng.randint(3, 6)
    bound = sum(
        share
        * least_us(
            BackboneCosts(profile, "net"),
            Cutting(
                sizes=split_sizes(batch_size, num_microbatches),
                num_devices=1,
                num_groups=3,
                schedule="1f1b",
                self_conditioned=conditioned,
            ),
            frozen_us=0,
            hidden=False,
        )
        for conditioned, share in ([(False, 0.5), (True, 0.5)] if seed % 2 else [(False, 1.0)])
    )
    for count in range(5):
        for cuts in itertools.combinations(range(1, 5), count):
            for stages in all_recomputes(on_one_device(5, cuts)):
                plan = plan_with(
                    stages,
                    num_groups=3,
                    batch_size=batch_size,
                    num_microbatches=num_microbatches,
                )
                assert bound + profile.overhead_us <= expected_us(plan, profile)


def test_buckets_have_about_equal_bytes_and_cover_all_layers_in_order() -> None:
    costs = BackboneCosts(model_profile([1] * 10), "net")
    found = list(bucket_stages(costs))
    assert {len(stages) for stages in found} == {2, 4, 8, 10}
    for stages in found:
        assert [s.start for s in stages] == [0, *(s.stop for s in stages[:-1])]
        assert stages[-1].stop == 10
    assert [(s.start, s.stop) for s in found[0]] == [(0, 5), (5, 10)]


def test_recomputing_buckets_fit_where_nothing_else_does() -> None:
    profile = model_profile([100] * 8, trained_bytes=10, width=0)
    (cost,) = profile.costs
    layers = tuple(replace(x, activation_bytes=tuple(100 * n for n in (1, 2, 4, 8, 16, 32, 64)))
                   for x in cost.layers)  # fmt: skip
    profile = replace(profile, costs=(replace(cost, layers=layers),), memory_bytes=320 + 400)
    found = search(profile, world_size=1, batch_size=1, space=Space())
    assert [s.recompute for s in found.plan.stages] == [True] * 2
    assert max(peak_bytes(found.plan, schedule_of(found.plan), profile)) == 320 + 400


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_are_those_of_one_stage(groups: int) -> None:
    make = partial(small_unet, 3, self_conditioning=True)
    graph = trace(make())
    batches = [[small_batch(4, seed=10 * s + r) for r in range(groups)] for s in range(2)]

    def gradients(cuts: tuple[int, ...]) -> dict[str, torch.Tensor | None]:
        plan = bucket_plan(graph, cuts, groups)
        options = {"filled": True, "coins": (True, False), "accumulate": 2}
        return gather_gradients(plan, run_pipeline(make, plan, batches, **options))

    whole, bucketed = gradients(()), gradients((2, 5))
    assert whole.keys() == bucketed.keys()
    for name, grad in whole.items():
        assert grad is not None
        assert torch.equal(grad, bucketed[name]), name


def bucket_plan(graph: ModelGraph, cuts: tuple[int, ...], groups: int) -> Plan:
    num_layers = len(graph.backbones[0].layers)
    name = graph.backbones[0].name
    stages = tuple(replace(s, backbone=name) for s in on_one_device(num_layers, cuts))
    plan = plan_with(stages, num_groups=groups, batch_size=4, num_microbatches=3)
    return replace(plan, graph_digest=digest(graph))

"""Several backbones in opposite directions compute what one process computes, bit for bit."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fills import some_fills
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Backbone, Field, Layer, Loss, PipelineSpec
from lightning_dpipe.runtime.threads import ThreadHub
from parity import all_rows, compare
from pipeline import gather_gradients, open_session, opposite_plan, run_pipeline
from small import cascade, random_model, small_batch


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("depths", "cuts"),
    [((3, 2), ((4,), (3,))), ((4, 1), ((2, 5, 7), (1, 3, 4))), ((1, 3), ((), ()))],
)
def test_two_opposite_backbones_are_bit_identical(depths, cuts, schedule) -> None:
    make = partial(cascade, depths)
    graph = trace(make())
    plan = opposite_plan(graph, cuts, num_microbatches=4, batch_size=4, schedule=schedule)
    compare(make, plan, all_rows(plan.world_size, 4, 2), exact=True)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
@pytest.mark.parametrize("feedback", [None, 0, 1])
def test_fills_and_self_conditioning_of_either_backbone_change_nothing(
    feedback, num_microbatches
) -> None:
    make = partial(cascade, (2, 3), feedback=feedback)
    graph = trace(make())
    plan = opposite_plan(graph, ((3, 5), (2, 6)), num_microbatches=num_microbatches, batch_size=4)
    assert len(graph.frozen) == 3
    plan = replace(plan, fills=some_fills(plan, graph, random.Random(5)))
    coins = None if feedback is None else (True, False, True)
    batches = all_rows(plan.world_size, 4, 3)
    compare(make, plan, batches, exact=True, coins=coins, filled=True)
    compare(make, replace(plan, fills=()), batches, exact=True, coins=coins)


@pytest.mark.parametrize("filled", [False, True])
def test_three_backbones_share_the_devices(filled) -> None:
    make = partial(cascade, (2, 1, 3))
    graph = trace(make())
    plan = opposite_plan(graph, ((3, 5), (2, 4), (1, 6)), num_microbatches=4, batch_size=3)
    assert [plan.stages_on(d) for d in range(3)] == [(0, 5, 6), (1, 4, 7), (2, 3, 8)]
    compare(make, plan, all_rows(3, 3, 2), exact=True, filled=filled)


@pytest.mark.parametrize(("groups", "replicas"), [(2, 1), (1, 2), (2, 2)])
def test_replicas_of_both_backbones_sum_to_the_global_mean(groups, replicas) -> None:
    make = partial(cascade, (2, 2), feedback=1)
    graph = trace(make())
    plan = opposite_plan(
        graph, ((3,), (4,)), num_microbatches=3, batch_size=4, groups=groups, replicas=replicas
    )
    batches = all_rows(plan.world_size, 4, 2)
    compare(make, plan, batches, exact=False, filled=True, coins=(True, False), accumulate=2)


def test_a_backbone_with_fewer_stages_leaves_devices_to_the_other() -> None:
    make = partial(cascade, (3, 1))
    plan = opposite_plan(trace(make()), ((2, 4, 6), (3,)), num_microbatches=3, batch_size=3)
    assert [plan.stages_on(d) for d in range(4)] == [(0,), (1,), (2, 5), (3, 4)]
    compare(make, plan, all_rows(4, 3, 2), exact=True, filled=True)


def test_all_stages_of_both_on_one_device_are_buckets_of_data_parallelism() -> None:
    make = partial(cascade, (2, 2), feedback=0)
    plan = opposite_plan(trace(make()), ((3,), (4,)), num_microbatches=3, batch_size=4)
    stages = tuple(replace(stage, devices=(0,)) for stage in plan.stages)
    plan = replace(plan, stages=stages, groups=((1,), (0,)))
    compare(
        make, plan, all_rows(2, 4, 2), exact=False, filled=True, coins=(True, True), accumulate=2
    )


def test_a_short_last_batch_trains_both() -> None:
    make = partial(cascade, (2, 2))
    plan = opposite_plan(trace(make()), ((3,), (4,)), num_microbatches=4, batch_size=4)
    compare(make, plan, [*all_rows(2, 4, 2), *all_rows(2, 1, 1)], exact=True, filled=True)


def test_dropout_depends_on_the_key_and_not_on_the_cut() -> None:
    make = partial(cascade, (2, 2), dropout=0.5)
    graph = trace(make())
    grads = []
    for cuts in (((), ()), ((3,), (4,)), ((2, 5), (3, 6))):
        plan = opposite_plan(graph, cuts, num_microbatches=2, batch_size=12 // (len(cuts[0]) + 1))
        rows, world = small_batch(12, seed=5), plan.world_size
        batch = [{k: v[r::world] for k, v in rows.items()} for r in range(world)]
        grads.append(gather_gradients(plan, run_pipeline(make, plan, [batch])))
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-6, atol=1e-8, msg=name)


def test_two_equal_backbones_draw_dropout_apart() -> None:
    """A key of layer, batch and rows alone would give both the same masks."""

    def backbone(name: str) -> Backbone:
        module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
        nn.init.eye_(module[0].weight)
        nn.init.zeros_(module[0].bias)
        layer = Layer(name="drop", module=module, reads=("image",), writes=("out",))
        return Backbone(name=name, layers=(layer,))

    spec = PipelineSpec(
        inputs={"image": Field(shape=(64,))},
        backbones=(backbone("a"), backbone("b")),
        loss={name: Loss(fn=lambda out: out.mean(1), reads=("out",)) for name in ("a", "b")},
    )
    graph = trace(spec)
    plan = opposite_plan(graph, ((), ()), num_microbatches=1, batch_size=2)
    session = open_session(spec, graph, plan, 0, ThreadHub(1).transport(0), None)
    batch = {"image": torch.ones(2, 64)}
    result = session.step(batch, sizes=(2,), batch_index=0, loss_scale=0.5)
    assert result.loss_sum.keys() == {"a", "b"}
    assert float(result.loss_sum["a"]) != float(result.loss_sum["b"])


@pytest.mark.parametrize("block", range(6))
def test_random_pairs_of_backbones_plans_and_batches(block) -> None:
    """60 in all, on up to 8 ranks; bit-identical without replicas."""
    for seed in range(10 * block, 10 * block + 10):
        draw = random.Random(seed)
        num_backbones = draw.choice((2, 2, 2, 3))
        make = partial(random_model, 1000 + seed, num_backbones)
        graph = trace(make())
        depths = [len(c.layers) for c in graph.backbones]
        places = draw.randint(1, min(4, *depths))
        counts = [places, *(draw.randint(1, places) for _ in depths[1:])]
        cuts = [
            sorted(draw.sample(range(1, depth), count - 1))
            for depth, count in zip(depths, counts, strict=True)
        ]
        replicas = draw.choice((1, 1, 2))
        groups = draw.choice((1, 2)) if places * replicas <= 4 else 1
        world = places * replicas * groups
        rows = [draw.randint(2, 4) for _ in range(world)]
        per_group = [sum(rows[g * places * replicas :][: places * replicas]) for g in range(groups)]
        plan = opposite_plan(
            graph, cuts, num_microbatches=draw.randint(1, min(per_group) // replicas),
            batch_size=max(rows), schedule=draw.choice(("gpipe", "1f1b")), replicas=replicas,
            groups=groups,
        )  # fmt: skip
        if draw.random() < 0.5:
            lengths = tuple((draw.randint(1, 5), draw.randint(1, 9)) for _ in plan.stages)
            plan = replace(plan, lengths=lengths)
        if draw.random() < 0.5:
            plan = replace(plan, fills=some_fills(plan, graph, draw))
        batches = [[small_batch(n, seed=r) for r, n in enumerate(rows)] for _ in range(2)]
        filled = draw.random() < 0.7
        compare(make, plan, batches, exact=world == places, filled=filled, accumulate=2)

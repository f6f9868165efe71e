"""Pipelines compute what one process computes, bit for bit with one replica."""

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.plan import Fill
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from parity import all_rows, compare, reference
from pipeline import gather_gradients, make_plan, run_pipeline
from small import random_model, small_batch, small_unet


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("cuts", [(), (4,), (2, 5), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_gradients_are_bit_identical_at_every_stage_count(cuts, schedule) -> None:
    make = partial(small_unet, 3)
    plan = make_plan(trace(make()), cuts, num_microbatches=4, batch_size=4, schedule=schedule)
    compare(make, plan, all_rows(plan.world_size, 4, 2), exact=True)


def test_replicas_sum_to_the_global_mean() -> None:
    make = partial(small_unet, 2)
    plan = make_plan(trace(make()), (3,), num_microbatches=3, batch_size=4, groups=2)
    compare(make, plan, all_rows(4, 4, 1), exact=False)


@pytest.mark.parametrize(
    ("cuts", "replicas", "groups"),
    [
        ((4,), (1, 2), 1),
        ((4,), (2, 1), 1),
        ((2, 5), (2, 1, 1), 1),
        ((4,), (3, 2), 1),
        ((3,), (1, 2), 2),
    ],
)
@pytest.mark.parametrize("selfcond", [False, True])
def test_unequal_replicas_of_stages_exchange_the_rows_they_share(
    cuts, replicas, groups, selfcond
) -> None:
    make = partial(small_unet, 3, self_conditioning=selfcond)
    plan = make_plan(
        trace(make()), cuts, num_microbatches=3, batch_size=5, replicas=replicas, groups=groups
    )
    coins = (True, False) if selfcond else None
    batches = all_rows(plan.world_size, 5, 2)
    compare(make, plan, batches, exact=False, coins=coins, filled=True, accumulate=2)


@pytest.mark.parametrize(
    ("cuts", "shares", "groups"),
    [
        ((), ((1, 2),), 1),
        ((), ((3, 1),), 2),
        ((4,), ((), (1, 3)), 1),
        ((4,), ((2, 1, 4), (5, 2)), 1),
        ((2, 5), ((4, 1), (), (1, 2)), 1),
    ],
)
@pytest.mark.parametrize("selfcond", [False, True])
def test_devices_with_unequal_shares_of_the_rows_sum_to_one_process(
    cuts, shares, groups, selfcond
) -> None:
    make = partial(small_unet, 3, self_conditioning=selfcond)
    plan = make_plan(
        trace(make()), cuts, num_microbatches=2, batch_size=5, groups=groups,
        replicas=[max(1, len(s)) for s in shares], shares=shares,
    )  # fmt: skip
    coins = (True, False, True) if selfcond else None
    world = plan.world_size
    batches = [*all_rows(world, 5, 2), *all_rows(world, 3, 1)]  # the last one is short
    compare(make, plan, batches, exact=False, coins=coins, filled=True, accumulate=3)


@pytest.mark.parametrize("seed", range(40))
def test_random_models_plans_and_shares(seed) -> None:
    draw = random.Random(1000 + seed)
    make = partial(random_model, seed)
    graph = trace(make())
    layers = len(graph.backbones[0].layers)
    num_stages = draw.randint(1, min(3, layers))
    cuts = sorted(draw.sample(range(1, layers), num_stages - 1))
    replicas = [draw.choice((1, 2, 3)) for _ in range(num_stages)]
    shares = [
        tuple(draw.randint(1, 9) for _ in range(n)) if draw.random() < 0.8 else () for n in replicas
    ]
    rows = [draw.randint(2, 6) for _ in range(sum(replicas))]
    plan = make_plan(
        graph, cuts, num_microbatches=draw.randint(1, sum(rows) // max(replicas)),
        batch_size=max(rows), replicas=replicas, shares=shares,
        schedule=draw.choice(("gpipe", "1f1b")),
    )  # fmt: skip
    batches = [[small_batch(n, seed=r) for r, n in enumerate(rows)] for _ in range(2)]
    compare(make, plan, batches, exact=False, filled=draw.random() < 0.5, accumulate=2)


@pytest.mark.parametrize("coins", [(True, False, True), (False, True, True)])
def test_self_conditioning_feeds_the_estimate_back(coins) -> None:
    make = partial(small_unet, 2, self_conditioning=True)
    plan = make_plan(trace(make()), (2, 4), num_microbatches=3, batch_size=3)
    compare(make, plan, all_rows(3, 3, 3), exact=True, coins=coins)


def test_evaluation_is_self_conditioned_when_its_coin_came_up() -> None:
    """Evaluation dropped the first sweep, so its loss was that of the other coin."""
    make = partial(small_unet, 2, self_conditioning=True)
    plan = make_plan(trace(make()), (2, 4), num_microbatches=3, batch_size=3)
    batches = all_rows(3, 3, 2)
    coins = (True, False)
    wanted, _ = reference(make, plan, batches, coins)
    outcomes = run_pipeline(make, plan, batches, coins=coins, training=False)
    found = [sum(o.loss_sums[step] for o in outcomes) for step in range(2)]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert reference(make, plan, batches, coins[::-1])[0] != pytest.approx(wanted, rel=1e-4)


def _fill(device, after, component, start, stop, first, last):
    return Fill(device=device, after=after, component=component, start=start, stop=stop,
                first=first, last=last)  # fmt: skip


def test_fills_split_by_layer_and_sample_leave_the_numbers_alone() -> None:
    make = partial(small_unet, 3)
    graph = trace(make())
    unfilled = make_plan(graph, (4,), num_microbatches=4, batch_size=6)
    order = [schedule_of(unfilled).orders[d] for d in range(2)]
    fills = (
        _fill(0, order[0][0], "text", 0, 2, 0, 6),
        _fill(0, order[0][1], "text", 2, 3, 0, 4),
        _fill(0, order[0][2], "noise", 0, 1, 0, 3),
        _fill(0, order[0][4], "text", 2, 3, 4, 6),
        _fill(0, order[0][-1], "noise", 0, 1, 3, 6),
        _fill(1, None, "text", 0, 1, 0, 2),
        _fill(1, None, "text", 0, 1, 2, 6),
        _fill(1, order[1][3], "text", 1, 3, 0, 6),
        _fill(1, order[1][-1], "noise", 0, 1, 0, 6),
    )
    plan = make_plan(graph, (4,), num_microbatches=4, batch_size=6, fills=fills)
    compare(make, plan, all_rows(2, 6, 4), exact=True, filled=True)


def test_accumulation_reduces_once_and_is_bit_identical() -> None:
    make = partial(small_unet, 2)
    plan = make_plan(trace(make()), (3,), num_microbatches=2, batch_size=4)
    compare(make, plan, all_rows(2, 4, 3), exact=True, accumulate=3)


def test_a_short_last_batch_trains() -> None:
    make = partial(small_unet, 2)
    plan = make_plan(trace(make()), (3,), num_microbatches=4, batch_size=4)
    batches = [*all_rows(2, 4, 2), *all_rows(2, 1, 1)]
    compare(make, plan, batches, exact=True, filled=True)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_any_batch_any_microbatches(data) -> None:
    depth = data.draw(st.integers(1, 4))
    make = partial(small_unet, depth, seed=data.draw(st.integers(0, 3)))
    graph = trace(make())
    layers = len(graph.backbones[0].layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, layers - 1), max_size=4)))
    world = len(cuts) + 1
    rows = data.draw(st.lists(st.integers(1, 5), min_size=world, max_size=world))
    microbatches = data.draw(st.integers(1, sum(rows)))
    plan = make_plan(
        graph, cuts, num_microbatches=microbatches, batch_size=max(rows),
        schedule=data.draw(st.sampled_from(["gpipe", "1f1b"])),
    )  # fmt: skip
    batches = [[small_batch(n, seed=r) for r, n in enumerate(rows)] for _ in range(2)]
    compare(make, plan, batches, exact=True, filled=data.draw(st.booleans()))


def test_dropout_depends_on_the_key_and_not_on_the_cut() -> None:
    make = partial(small_unet, 2, dropout=0.5)
    graph = trace(make())
    grads = []
    for cuts in ((), (3,), (2, 5)):
        plan = make_plan(graph, cuts, num_microbatches=2, batch_size=12 // (len(cuts) + 1))
        joint_rows = small_batch(12, seed=5)
        world = plan.world_size
        batch = [{k: v[r::world] for k, v in joint_rows.items()} for r in range(world)]
        outcomes = run_pipeline(make, plan, [batch])
        grads.append(gather_gradients(plan, outcomes))
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("block", range(10))
def test_random_models_plans_replicas_and_batches(block) -> None:
    """300 in all, on up to 8 ranks; bit-identical without replicas."""
    for seed in range(30 * block, 30 * block + 30):
        draw = random.Random(seed)
        make = partial(random_model, seed)
        graph = trace(make())
        layers = len(graph.backbones[0].layers)
        num_stages = draw.randint(1, min(4, layers))
        cuts = sorted(draw.sample(range(1, layers), num_stages - 1))
        replicas = tuple(draw.choice((1, 1, 2)) for _ in range(num_stages))
        groups = draw.choice((1, 1, 2)) if sum(replicas) <= 4 else 1
        world = sum(replicas) * groups
        rows = [draw.randint(2, 4) for _ in range(world)]
        microbatches = draw.randint(1, min(map(sum, _by_group(rows, groups))) // max(replicas))
        plan = make_plan(
            graph, cuts, num_microbatches=microbatches, batch_size=max(rows),
            schedule=draw.choice(("gpipe", "1f1b")), replicas=replicas, groups=groups,
        )  # fmt: skip
        batches = [[small_batch(n, seed=r) for r, n in enumerate(rows)] for _ in range(2)]
        filled = draw.random() < 0.5
        compare(make, plan, batches, exact=world == num_stages, filled=filled, accumulate=2)


def _by_group(rows: list[int], groups: int) -> list[list[int]]:
    size = len(rows) // groups
    return [rows[i * size : (i + 1) * size] for i in range(groups)]

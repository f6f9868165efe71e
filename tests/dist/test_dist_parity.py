"""Real gloo ranks compute what one process computes: unequal replicas, opposite backbones."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fills import some_fills
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.reduce import open_reducer
from parity import Make, all_rows, same
from pipeline import make_plan, open_session, opposite_plan, own_gradients, steps
from ranks import run_ranks
from small import cascade, small_unet

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


def train(rank: int, make: Make, plan: Plan, batches: Any, options: dict[str, Any]) -> Any:
    """One rank's losses and gradients."""
    spec = copy.deepcopy(make())
    reducer = open_reducer(plan.replica_sets, rank, CPU)
    session = open_session(spec, trace(spec), plan, rank, DistTransport(CPU), reducer)
    losses = list(steps(session, batches, **options))
    grads = own_gradients(plan, rank, spec)
    session.close()
    return losses, grads


def compare(make: Make, plan: Plan, *, exact: bool, rows: int = 4, **options: Any) -> None:
    batches = all_rows(plan.world_size, rows, 3)
    ranks = run_ranks(train, plan.world_size, make, plan, batches, options, timeout_s=120)
    sums = [sum(x) for x in zip(*(losses for losses, _ in ranks), strict=True)]
    found = {name: grad for rank in plan.groups[0] for name, grad in ranks[rank][1].items()}
    same(make, plan, batches, sums, found, exact=exact, **options)
    for group in plan.groups[1:]:  # every replica holds the same sums
        for rank in group:
            for name, grad in ranks[rank][1].items():
                assert torch.equal(grad, found[name]), name


@pytest.mark.parametrize(
    ("cuts", "replicas"), [((4,), (1, 2)), ((4,), (2, 1)), ((2, 5), (2, 1, 1))]
)
def test_stages_on_unequal_numbers_of_ranks(cuts: Sequence[int], replicas: Sequence[int]) -> None:
    make = partial(small_unet, 3, self_conditioning=True)
    plan = make_plan(
        trace(make()), cuts, num_microbatches=3, batch_size=4, replicas=replicas
    )
    compare(make, plan, exact=False, filled=True, coins=(True, False, True), accumulate=3)


@pytest.mark.parametrize(
    ("cuts", "depths"), [(((4,), (3,)), (3, 1)), (((2, 4, 6), (1, 3, 5)), (3, 2))]
)
@pytest.mark.parametrize("filled", [False, True])
def test_opposite_backbones_are_bit_identical(cuts, depths, filled: bool) -> None:
    make = partial(cascade, depths, feedback=1)
    graph = trace(make())
    plan = opposite_plan(graph, cuts, num_microbatches=5, batch_size=4)
    plan = replace(plan, fills=some_fills(plan, graph, random.Random(1)))
    compare(make, plan, exact=True, filled=filled, coins=(False, True, True))


@pytest.mark.parametrize(("groups", "replicas"), [(2, 1), (1, 2)])
def test_opposite_backbones_with_replicas(groups: int, replicas: int) -> None:
    make = partial(cascade, (2, 3))
    plan = opposite_plan(
        trace(make()), ((3,), (4,)), num_microbatches=3, batch_size=4, groups=groups,
        replicas=replicas,
    )  # fmt: skip
    compare(make, plan, exact=False, filled=True, accumulate=3)


def test_three_backbones_on_three_ranks() -> None:
    make = partial(cascade, (2, 1, 3))
    plan = opposite_plan(
        trace(make()), ((3, 5), (2, 4), (1, 6)), num_microbatches=4, batch_size=4
    )
    compare(make, plan, exact=True, filled=True)

import pytest
import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import RankError
from lightning_dpipe.runtime.reduce import SMALL_BYTES, open_reducer
from ranks import RankFailureError, run_ranks

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")
LARGE = SMALL_BYTES // 4


def parameters() -> list[nn.Parameter]:
    """Small and large, two dtypes, one frozen; the large conv weight's gradient is transposed."""
    made = [
        nn.Parameter(torch.zeros(3, 5)),
        nn.Parameter(torch.zeros(LARGE + 8)),
        nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2), requires_grad=False),
        nn.Parameter(torch.zeros(1024, 512)),
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(4)),  # no replica has a gradient
    ]
    assert made[4].numel() * 4 > SMALL_BYTES
    return made


def gradient(p: nn.Parameter, index: int, rank: int, step: int) -> Tensor | None:
    """Small integers, whose sums are exact in any order; some replicas have none."""
    if index in (3, 6) or (index + rank + step) % 3 == 0:
        return None
    values = torch.randint(
        -8, 8, p.shape, generator=torch.Generator().manual_seed(index + 7 * rank)
    )
    grad = values.to(p.dtype)
    return grad.t().contiguous().t() if index == 4 else grad


def reduce_steps(rank: int, num_steps: int) -> list[list[Tensor | None]]:
    reducer = open_reducer(((0, 1, 2),), rank, CPU)
    assert reducer is not None
    first, second = parameters(), parameters()[:3]
    results = []
    for step in range(num_steps):
        for stage in (first, second):
            for index, p in enumerate(stage):
                p.grad = gradient(p, index, rank, step)
            reducer.start(stage)
        reducer.wait()
        results.append([p.grad for p in (*first, *second)])
    return results


def test_gradients_are_the_sum_over_replicas_and_absent_ones_count_as_zero() -> None:
    results = run_ranks(reduce_steps, 3, 3)
    kinds = list(enumerate(parameters())) + list(enumerate(parameters()[:3]))
    for step in range(3):
        for place, (index, p) in enumerate(kinds):
            grads = [gradient(p, index, rank, step) for rank in range(3)]
            present = [g for g in grads if g is not None]
            for rank in range(3):
                got = results[rank][step][place]
                if not present:
                    assert got is None
                else:
                    assert got is not None
                    assert torch.equal(got, sum(present, torch.zeros_like(p)))


def groups_of_two(rank: int) -> tuple[float, bool]:
    reducer = open_reducer(((1, 3), (0, 2)), rank, CPU)
    assert reducer is not None
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.full((1,), 10.0**rank)
    reducer.start([p])
    reducer.start([nn.Parameter(torch.zeros(1), requires_grad=False)])
    reducer.start([])
    reducer.wait()
    return float(p.grad), open_reducer(((3,), (2,), (1,), (0,)), rank, CPU) is None


def test_each_device_sums_with_the_same_device_of_the_other_groups() -> None:
    assert run_ranks(groups_of_two, 4) == [(x, True) for x in (101.0, 1010.0, 101.0, 1010.0)]


def replica_dies(rank: int) -> None:
    reducer = open_reducer(((0, 1),), rank, CPU)
    assert reducer is not None
    if rank == 0:
        raise KeyError("the cause")
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    try:
        reducer.start([p])
        reducer.wait()
    except RankError as error:
        raise RuntimeError(f"rank 1 saw: {error}") from error


def test_a_replica_that_is_gone_is_reported_with_its_group() -> None:
    with pytest.raises(RankFailureError, match="the cause") as failure:
        run_ranks(replica_dies, 2)
    assert "rank 1 saw: the gradient sum over ranks [0, 1] did not complete" in str(failure.value)

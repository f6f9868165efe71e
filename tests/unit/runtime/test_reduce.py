import pytest
import torch
from torch import nn

from lightning_dpipe.core.errors import RankError
from lightning_dpipe.runtime.reduce import ThreadReduction
from lightning_dpipe.runtime.threads import ThreadHub
from ranks import run_threads


def test_threads_sum_in_replica_order_bit_for_bit() -> None:
    hub = ThreadHub(3)
    reduction = ThreadReduction(hub, 3)
    grads = torch.randn(3, 2, 1000, generator=torch.Generator().manual_seed(0))

    def body(rank: int, hub: ThreadHub) -> list[torch.Tensor]:
        reducer = reduction.reducer(rank)
        stages = [[nn.Parameter(torch.zeros(1000))] for _ in range(2)]
        for stage, (p,) in enumerate(stages):
            p.grad = grads[rank, stage].clone()
            reducer.start([p])
        reducer.wait()
        return [p.grad for (p,) in stages if p.grad is not None]

    for sums in run_threads(body, 3, hub=hub):
        for stage in range(2):
            assert torch.equal(sums[stage], grads[0, stage] + grads[1, stage] + grads[2, stage])
    assert not reduction.rounds


def test_an_absent_gradient_is_zero_and_stays_absent_when_nobody_has_one() -> None:
    hub = ThreadHub(2)
    reduction = ThreadReduction(hub, 2)

    def body(rank: int, hub: ThreadHub) -> list[list[float] | None]:
        reducer = reduction.reducer(rank)
        some, none = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        if rank == 1:
            some.grad = torch.ones(2)
        reducer.start([some, none, frozen])
        reducer.wait()
        return [None if p.grad is None else p.grad.tolist() for p in (some, none, frozen)]

    assert run_threads(body, 2, hub=hub) == [[[1.0, 1.0], None, None]] * 2


def test_a_replica_that_never_starts_is_counted_in_the_error() -> None:
    reducer = ThreadReduction(ThreadHub(2, timeout_s=0.05), 2).reducer(1)
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(1)
    reducer.start([p])
    with pytest.raises(RankError, match=r"only replicas \[1\] of 2"):
        reducer.wait()

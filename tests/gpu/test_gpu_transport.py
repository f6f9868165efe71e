import pytest
import torch
from torch import nn

from lightning_dpipe.core.program import Channel, Lane, Message
from lightning_dpipe.profiling.clock import clock_for
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.reduce import open_reducer
from lightning_dpipe.runtime.threads import ThreadHub
from ranks import run_ranks, run_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EDGE = Channel(source=0, target=1, lane=Lane.PIPELINE)
SHAPE = (512, 1024)


def message(i: int) -> Message:
    return Message(channel=EDGE, tag=f"m{i}", shape=SHAPE, dtype="float32")


def slow_value(i: int, device: torch.device) -> torch.Tensor:
    """A tensor that is still being computed when it is handed over."""
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(10):
        busy = busy @ busy / 2048
    return torch.full(SHAPE, float(i), device=device) + 0 * busy.nan_to_num().sum().clamp(0, 0)


def staged(rank: int) -> list[float]:
    device = torch.device("cuda", 0)
    transport = DistTransport(device)
    transport.open([EDGE])
    sums, sending = [], []
    for i in range(6):  # reuses the pinned copies
        if rank == 0:
            sending.append(transport.send(message(i), slow_value(i, device)))
        else:
            buffer = torch.empty(SHAPE, device=device)
            transport.post(message(i), buffer).wait()
            sums.append(buffer.mean())
        if i % 2:
            for handle in sending:
                handle.wait()
            sending.clear()
    return [float(x) for x in sums]


def test_gloo_carries_cuda_tensors_between_two_ranks_on_one_gpu() -> None:
    assert run_ranks(staged, 2)[1] == [float(i) for i in range(6)]


def test_threads_order_their_copies_by_streams() -> None:
    device = torch.device("cuda", 0)

    def body(rank: int, hub: ThreadHub) -> list[float]:
        transport = hub.transport(rank)
        transport.open([EDGE])
        sums = []
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            for i in range(6):
                if rank == 0:
                    transport.send(message(i), slow_value(i, device)).wait()
                else:
                    buffer = torch.empty(SHAPE, device=device)
                    transport.post(message(i), buffer).wait()
                    sums.append(buffer.mean())
            return [float(x) for x in sums]

    assert run_threads(body, 2)[1] == [float(i) for i in range(6)]


def summed(rank: int) -> list[float]:
    device = torch.device("cuda", 0)
    reducer = open_reducer(((0,), (1,)), rank, device)
    assert reducer is not None
    parameters = [nn.Parameter(torch.zeros(n, device=device)) for n in (3, 1 << 20)]
    for p in parameters:
        p.grad = torch.full_like(p, rank + 1.0)
    reducer.start(parameters)
    reducer.wait()
    return [float(p.grad.mean()) for p in parameters if p.grad is not None]


def test_gradients_on_the_gpu_are_summed() -> None:
    assert run_ranks(summed, 2) == [[3.0, 3.0]] * 2


def test_the_device_clock_sees_work_that_the_host_does_not_wait_for() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(4096, 4096, device=device)
    clock = clock_for(device)
    clock.measure(lambda: a @ a)
    _, one_us = clock.measure(lambda: a @ a)
    _, ten_us = clock.measure(lambda: [a @ a for _ in range(10)])
    assert ten_us > 4 * one_us > 0

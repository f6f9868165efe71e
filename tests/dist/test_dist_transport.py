import os
import time

import pytest
import torch
import torch.distributed as dist

from lightning_dpipe.core.errors import RankError, TransportError
from lightning_dpipe.core.program import Channel, Lane, Message
from lightning_dpipe.runtime.distributed import DistTransport
from ranks import RankFailureError, run_ranks

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


def channel(source: int, target: int, lane: Lane = Lane.PIPELINE) -> Channel:
    return Channel(source=source, target=target, lane=lane)


def message(edge: Channel, tag: str, *shape: int, dtype: str = "float32") -> Message:
    return Message(channel=edge, tag=tag, shape=shape, dtype=dtype)


def all_edges(num_ranks: int) -> list[Channel]:
    return [
        channel(a, b, lane) for lane in Lane for a in range(num_ranks) for b in range(num_ranks)
        if a != b
    ]  # fmt: skip


def exchange(rank: int, num_ranks: int, num_messages: int) -> list[list[float]]:
    """Everyone sends to everyone on both lanes, sends first, waits in the reverse order."""
    transport = DistTransport(CPU)
    edges = all_edges(num_ranks)
    transport.open(edges)
    transport.open(edges)  # known channels are skipped
    handles, got = [], {}
    for edge in edges:
        for i in range(num_messages):
            m = message(edge, f"m{i}", i + 1, dtype="int64" if i % 2 else "float32")
            mark = 100 * edge.source + 10 * i + (edge.lane is Lane.ROWS)
            tensor = torch.full(m.shape, mark, dtype=getattr(torch, m.dtype))
            if edge.source == rank:
                handles.append(transport.send(m, tensor))
            elif edge.target == rank:
                buffer = torch.full_like(tensor, -1)
                handles.append(transport.post(m, buffer))
                got[edge, i] = (buffer, tensor)
    for handle in reversed(handles):
        handle.wait()
    for buffer, tensor in got.values():
        assert torch.equal(buffer, tensor)
    transport.close()
    return [[float(b.sum()) for b, _ in got.values()]]


def test_all_pairs_exchange_in_order_though_everyone_sends_first() -> None:
    sums = run_ranks(exchange, 3, 3, 5)
    assert all(len(s[0]) == 2 * 2 * 5 for s in sums)


def row_slice(rank: int) -> list[float]:
    transport = DistTransport(CPU)
    edge = channel(0, 1)
    transport.open([edge])
    whole = torch.zeros(4, 2)
    m = message(edge, "rows", 2, 2)
    if rank == 0:
        transport.send(m, torch.ones(2, 2)).wait()
    else:
        transport.post(m, whole[1:3]).wait()
    return whole.sum(1).tolist()


def test_a_receive_fills_a_slice_of_rows_only() -> None:
    assert run_ranks(row_slice, 2)[1] == [0.0, 2.0, 2.0, 0.0]


def misfit(rank: int) -> list[str]:
    transport = DistTransport(CPU)
    edge = channel(0, 1)
    transport.open([edge])
    m = message(edge, "h/0", 2, 3)
    texts = []
    start = transport.send if rank == 0 else transport.post
    bad = (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2).t())
    for tensor in bad:
        with pytest.raises(TransportError) as error:
            start(m, tensor)
        texts.append(str(error.value))
    other = transport.post if rank == 0 else transport.send
    with pytest.raises(TransportError, match=f"rank {rank} cannot"):
        other(m, torch.zeros(2, 3))
    with pytest.raises(TransportError, match="not open"):
        transport.send(message(channel(rank, 1 - rank, Lane.ROWS), "x", 1), torch.zeros(1))
    return texts


def test_a_tensor_that_does_not_fit_its_message_is_refused_before_it_travels() -> None:
    for texts in run_ranks(misfit, 2):
        assert "float32 [2, 4]" in texts[0]
        assert "int64 [2, 3]" in texts[1]
        assert "contiguous" in texts[2]


def different_lists(rank: int) -> str:
    transport = DistTransport(CPU)
    with pytest.raises(TransportError) as error:
        transport.open([channel(0, 1)] if rank == 0 else [channel(1, 0)])
    return str(error.value)


def test_different_channel_lists_are_refused_instead_of_hanging() -> None:
    assert all("same list" in text for text in run_ranks(different_lists, 2))


def peer_dies(rank: int) -> str:
    transport = DistTransport(CPU)
    edge = channel(0, 1)
    transport.open([edge])
    if rank == 0:
        os._exit(3)
    handle = transport.post(message(edge, "h/0", 4), torch.zeros(4))
    try:
        handle.wait()
    except RankError as error:
        raise RuntimeError(f"rank 1 saw: {error}") from error
    return "arrived"


def test_a_dead_peer_is_named_at_once() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailureError) as failure:
        run_ranks(peer_dies, 2)
    assert "exit code 3" in str(failure.value)
    assert "rank 1 saw: rank 0 did not complete message 'h/0'" in str(failure.value)
    assert time.monotonic() - start_s < 45  # far below the group's 60 s timeout


def silent_peer(rank: int) -> str:
    from datetime import timedelta

    transport = DistTransport(CPU, timeout=timedelta(seconds=1))
    edge = channel(0, 1)
    transport.open([edge])
    text = ""
    if rank == 1:
        with pytest.raises(RankError) as error:
            transport.post(message(edge, "h/0", 4), torch.zeros(4)).wait()
        text = str(error.value)
    dist.barrier()
    return text


def test_a_message_that_never_comes_times_out_with_its_name() -> None:
    assert "message 'h/0' (rank 0 -> rank 1" in run_ranks(silent_peer, 2)[1]


def fails_on_one(rank: int) -> int:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()
    return rank


def test_the_failing_ranks_traceback_is_in_the_failure() -> None:
    with pytest.raises(RankFailureError, match="the cause") as failure:
        run_ranks(fails_on_one, 2)
    assert "in fails_on_one" in str(failure.value)


def test_the_harness_ends_ranks_that_hang() -> None:
    with pytest.raises(RankFailureError, match=r"ranks \[0, 1\] did not end in time"):
        run_ranks(time_sleep, 2, 60.0, timeout_s=3.0)


def time_sleep(rank: int, seconds: float) -> None:
    time.sleep(seconds)

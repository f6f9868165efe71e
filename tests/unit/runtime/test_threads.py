import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.errors import RankError, TransportError
from lightning_dpipe.core.program import Channel, Lane, Message
from lightning_dpipe.runtime.threads import Delay, ThreadHub, ThreadTransport
from ranks import run_threads

EDGE = Channel(source=0, target=1, lane=Lane.PIPELINE)


def message(i: int, *shape: int, edge: Channel = EDGE) -> Message:
    return Message(channel=edge, tag=f"m{i}", shape=shape, dtype="float32")


def pair(hub: ThreadHub) -> tuple[ThreadTransport, ThreadTransport]:
    sender, receiver = hub.transport(0), hub.transport(1)
    sender.open([EDGE])
    receiver.open([EDGE])
    return sender, receiver


@settings(deadline=None, max_examples=60)
@given(order=st.permutations(["s"] * 5 + ["p"] * 5), rendezvous=st.booleans())
def test_messages_arrive_in_order_however_sends_and_posts_interleave(
    order: list[str], rendezvous: bool
) -> None:
    sender, receiver = pair(ThreadHub(2, rendezvous=rendezvous))
    buffers = [torch.zeros(i + 1) for i in range(5)]
    handles, sent, posted = [], 0, 0
    for step in order:
        if step == "s":
            handles.append(
                sender.send(message(sent, sent + 1), torch.full((sent + 1,), sent + 1.0))
            )
            sent += 1
        else:
            handles.append(receiver.post(message(posted, posted + 1), buffers[posted]))
            posted += 1
    for handle in reversed(handles):
        handle.wait()
    assert [b.tolist() for b in buffers] == [[i + 1.0] * (i + 1) for i in range(5)]


def test_lanes_do_not_wait_for_each_other() -> None:
    hub = ThreadHub(2)
    rows = Channel(source=0, target=1, lane=Lane.ROWS)
    sender, receiver = pair(hub)
    sender.open([rows])
    sender.send(message(0, 1), torch.ones(1))
    late = sender.send(message(1, 1, edge=rows), torch.full((1,), 2.0))
    buffer = torch.zeros(1)
    receiver.post(message(1, 1, edge=rows), buffer).wait()
    late.wait()
    assert buffer.item() == 2.0


def test_a_rendezvous_send_waits_for_its_receive_and_a_buffered_one_does_not() -> None:
    sender, _ = pair(ThreadHub(2, rendezvous=True, timeout_s=0.05))
    with pytest.raises(RankError, match="rank 1 never posted a receive for message 'm0'"):
        sender.send(message(0, 1), torch.ones(1)).wait()
    sender, receiver = pair(ThreadHub(2, rendezvous=False))
    tensor, buffer = torch.ones(1), torch.zeros(1)
    sender.send(message(0, 1), tensor).wait()
    tensor.fill_(7.0)  # may be reused after the wait
    receiver.post(message(0, 1), buffer).wait()
    assert buffer.item() == 1.0


def test_a_receive_that_never_comes_times_out_with_its_name() -> None:
    _, receiver = pair(ThreadHub(2, timeout_s=0.05))
    with pytest.raises(RankError, match="rank 0 never sent message 'm3'"):
        receiver.post(message(3, 1), torch.zeros(1)).wait()


def test_both_ends_learn_that_they_disagree_on_the_next_message() -> None:
    sender, receiver = pair(ThreadHub(2))
    handles = (
        sender.send(message(0, 1), torch.ones(1)),
        receiver.post(message(1, 1), torch.ones(1)),
    )
    for handle in handles:
        with pytest.raises(TransportError, match=r"'m0'.*'m1'"):
            handle.wait()


def test_misfits_wrong_ends_and_closed_channels_are_refused() -> None:
    sender, receiver = pair(ThreadHub(2))
    with pytest.raises(TransportError, match=r"float32 \[3\].*the tensor is float32 \[2\]"):
        sender.send(message(0, 3), torch.zeros(2))
    with pytest.raises(TransportError, match="int64"):
        receiver.post(message(0, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TransportError, match="contiguous"):
        receiver.post(message(0, 2, 3), torch.zeros(3, 2).t())
    with pytest.raises(TransportError, match="rank 1 cannot send"):
        receiver.send(message(0, 3), torch.zeros(3))
    back = Channel(source=1, target=0, lane=Lane.ROWS)
    with pytest.raises(TransportError, match="not open"):
        receiver.send(message(0, 3, edge=back), torch.zeros(3))


def test_a_send_of_graph_state_carries_no_graph_and_a_leaf_can_be_a_buffer() -> None:
    sender, receiver = pair(ThreadHub(2))
    leaf = torch.zeros(2, requires_grad=True)
    receiver.post(message(0, 2), leaf)
    sender.send(message(0, 2), torch.ones(2, requires_grad=True) * 2).wait()
    assert leaf.tolist() == [2.0, 2.0]
    assert leaf.is_leaf


def test_a_failing_thread_ends_the_others_with_its_own_traceback() -> None:
    seen: list[str] = []

    def body(rank: int, hub: ThreadHub) -> None:
        transport = hub.transport(rank)
        transport.open([EDGE])
        if rank == 0:
            raise KeyError("the cause")
        try:
            transport.post(message(0, 1), torch.zeros(1)).wait()
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="the cause"):
        run_threads(body, 2, timeout_s=30.0)
    assert "rank 0 failed" in seen[0]
    assert "in body" in seen[0]


def test_an_aborted_hub_refuses_new_transfers() -> None:
    hub = ThreadHub(2)
    sender, _ = pair(hub)
    hub.abort(ValueError("first"), rank=1)
    hub.abort(ValueError("second"), rank=0)
    with pytest.raises(RankError, match="rank 1 failed") as error:
        sender.send(message(0, 1), torch.zeros(1))
    assert str(error.value.__cause__) == "first"


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("rendezvous", [False, True])
def test_an_emulated_link_delivers_after_latency_and_one_message_after_the_other(
    rendezvous: bool,
) -> None:
    fake = FakeTime()
    link = Delay(latency_s=1.0, bytes_per_s=4.0)
    hub = ThreadHub(
        2, rendezvous=rendezvous, delays={(0, 1): link}, clock=fake.clock, sleep=fake.sleep
    )
    sender, receiver = pair(hub)
    sends = [sender.send(message(i, 2), torch.zeros(2)) for i in range(2)]  # 8 bytes: 2 s each
    fake.now_s = 101.0
    posts = [receiver.post(message(i, 2), torch.zeros(2)) for i in range(2)]
    first_start_s = 101.0 if rendezvous else 100.0
    posts[0].wait()
    assert fake.now_s == first_start_s + 2.0 + 1.0
    sends[1].wait()
    assert fake.now_s == (first_start_s + 4.0 if rendezvous else first_start_s + 3.0)
    posts[1].wait()
    assert fake.now_s == first_start_s + 4.0 + 1.0
    posts[1].wait()  # long past: no more sleep
    assert fake.now_s == first_start_s + 5.0
    assert [post.arrived_s for post in posts] == [first_start_s + 3.0, first_start_s + 5.0]


def test_an_emulated_link_may_take_a_message_for_larger_than_its_tensor() -> None:
    fake = FakeTime()
    link = Delay(latency_s=1.0, bytes_per_s=4.0, bytes_of=lambda m: 100 * m.shape[0])
    hub = ThreadHub(2, delay=link, clock=fake.clock, sleep=fake.sleep)
    sender, receiver = pair(hub)
    sender.send(message(0, 2), torch.zeros(2))
    receiver.post(message(0, 2), torch.zeros(2)).wait()
    assert fake.now_s == 100.0 + 200 / 4.0 + 1.0


def test_two_threads_that_both_send_first_do_not_hang() -> None:
    edges = [EDGE, Channel(source=1, target=0, lane=Lane.PIPELINE)]
    barrier = threading.Barrier(2)

    def body(rank: int, hub: ThreadHub) -> float:
        transport = hub.transport(rank)
        transport.open(edges)
        out = transport.send(message(0, 1, edge=edges[rank]), torch.full((1,), float(rank)))
        barrier.wait(10.0)
        buffer = torch.zeros(1)
        transport.post(message(0, 1, edge=edges[1 - rank]), buffer).wait()
        out.wait()
        return buffer.item()

    assert run_threads(body, 2) == [1.0, 0.0]

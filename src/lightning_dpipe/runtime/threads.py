"""Transport between threads of one process: tests, emulated devices, several stages on one GPU.

In:     as in `transport`; each rank is a thread.
Out:    exact copies, in FIFO order per channel. Whoever comes second, sender or receiver, copies
        once, straight into the posted buffer.
Link latency and bandwidth can be emulated: the receiver's wait returns no earlier than the data
would have arrived (one monotonic clock on one host). A failing thread aborts the hub, which wakes
every other one with a RankError.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dpipe.core.errors import RankError, TransportError
from lightning_dpipe.core.program import Channel, Message
from lightning_dpipe.runtime.transport import check_end, check_fits, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """An emulated link. Messages of a channel follow each other on the wire.

    `bytes_of` says what a message weighs, if that is not the size of its tensor.
    """

    latency_s: float
    bytes_per_s: float
    bytes_of: Callable[[Message], int] | None = None


@dataclass(slots=True, eq=False)
class _End:
    """One side of a transfer; `at_s` is when it was started."""

    message: Message
    tensor: Tensor
    at_s: float
    event: torch.cuda.Event | None
    done: bool = False
    error: TransportError | None = None
    ready_s: float = 0.0  # when the emulated wire is through with it
    copied: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class _Wire:
    """The state of one channel, guarded by its condition."""

    condition: threading.Condition
    delay: Delay | None
    sent: deque[_End] = field(default_factory=deque)
    posted: deque[_End] = field(default_factory=deque)
    free_s: float = 0.0


class ThreadHub:
    """Joins the ranks of one process.

    With `rendezvous` a send is complete only once its receive was posted, as in gloo and NCCL;
    without, an early send is buffered. `delays` maps (source, target) to an emulated link, `delay`
    is the link of all other edges. `clock` and `sleep` are for tests of the emulation.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        rendezvous: bool = True,
        delay: Delay | None = None,
        delays: Mapping[tuple[int, int], Delay] | None = None,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_ranks = num_ranks
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s
        self.clock = clock
        self.sleep = sleep
        self._delay = delay
        self._delays = dict(delays or {})
        self._wires: dict[Channel, _Wire] = {}
        self._conditions: list[threading.Condition] = []
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException] | None = None

    def transport(self, rank: int) -> "ThreadTransport":
        """The transport of one rank."""
        if not 0 <= rank < self.num_ranks:
            raise TransportError(f"rank {rank} is not one of the hub's {self.num_ranks} ranks")
        return ThreadTransport(self, rank)

    def condition(self) -> threading.Condition:
        """A new condition, woken by `abort` too."""
        condition = threading.Condition()
        with self._lock:
            self._conditions.append(condition)
        return condition

    def abort(self, error: BaseException, rank: int | None = None) -> None:
        """Make every present and future wait raise a RankError that shows `error`."""
        who = "another rank" if rank is None else f"rank {rank}"
        text = "".join(traceback.format_exception(error)).rstrip()
        with self._lock:
            if self._failure is None:
                self._failure = (f"{who} failed:\n{text}", error)
            conditions = tuple(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()

    def check(self) -> None:
        """Raise if the hub was aborted.

        Raises:
            RankError: It was.
        """
        if self._failure is not None:
            text, error = self._failure
            raise RankError(text) from error

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], bool], what: Callable[[], str]
    ) -> None:
        """Wait (holding `condition`) until `ready`.

        Raises:
            RankError: The hub was aborted, or `timeout_s` passed; `what` says what was awaited.
        """
        condition.wait_for(lambda: ready() or self._failure is not None, self.timeout_s)
        if not ready():
            self.check()
            raise RankError(f"no answer within {self.timeout_s} s: {what()}")

    def open(self, channels: Iterable[Channel]) -> None:
        """Create the wires that do not exist yet."""
        for channel in channels:
            condition = self.condition()
            link = self._delays.get((channel.source, channel.target), self._delay)
            with self._lock:
                self._wires.setdefault(channel, _Wire(condition=condition, delay=link))

    def wire(self, channel: Channel) -> _Wire:
        """The state of a channel.

        Raises:
            TransportError: It was never opened.
        """
        wire = self._wires.get(channel)
        if wire is None:
            raise TransportError(
                f"channel {channel.source} -> {channel.target} ({channel.lane.value}) is not open; "
                "pass it to open() before the first step"
            )
        return wire


class ThreadTransport:
    """One rank's access to a ThreadHub."""

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank

    def open(self, channels: Iterable[Channel]) -> None:
        """Prepare channels; needs no other rank."""
        self.hub.open(channels)

    def close(self) -> None:
        """Nothing to release: the hub lives as long as its last rank."""

    def post(self, message: Message, buffer: Tensor) -> "ThreadHandle":
        """Start receiving `message` into `buffer`."""
        return self._start(message, buffer, receiving=True)

    def send(self, message: Message, tensor: Tensor) -> "ThreadHandle":
        """Start sending `tensor`."""
        return self._start(message, tensor, receiving=False)

    def now_s(self) -> float:
        """When a transfer begins that is started now; an emulated device has a clock of its own."""
        return self.hub.clock()

    def _start(self, message: Message, tensor: Tensor, *, receiving: bool) -> "ThreadHandle":
        hub = self.hub
        hub.check()
        check_end(message, self.rank, receiving=receiving)
        check_fits(message, tensor)
        wire = hub.wire(message.channel)
        event = _record(tensor)
        end = _End(message=message, tensor=tensor.detach(), at_s=self.now_s(), event=event)
        handle = ThreadHandle(hub, wire, end, receiving)
        with wire.condition:
            mine, theirs = (wire.posted, wire.sent) if receiving else (wire.sent, wire.posted)
            if theirs:
                peer = theirs.popleft()
                send, receive = (peer, end) if receiving else (end, peer)
                _deliver(wire, send, receive, hub.rendezvous)
                wire.condition.notify_all()
            else:
                if not receiving and not hub.rendezvous:
                    end.tensor = end.tensor.clone()
                    end.event = _record(end.tensor)
                mine.append(end)
        return handle


class ThreadHandle:
    """Waits for the other end, then for the emulated wire."""

    __slots__ = ("_end", "_hub", "_receiving", "_wire")

    def __init__(self, hub: ThreadHub, wire: _Wire, end: _End, receiving: bool) -> None:
        self._hub = hub
        self._wire = wire
        self._end = end
        self._receiving = receiving

    @property
    def arrived_s(self) -> float:
        """When the emulated link delivered it, by the hub's clock; known after the wait."""
        return self._end.ready_s

    def wait(self) -> None:
        """See `transport.Handle`."""
        end, hub = self._end, self._hub
        if not self._receiving and not hub.rendezvous and end.error is None:
            return
        with self._wire.condition:
            hub.wait_for(self._wire.condition, lambda: end.done, self._what)
        if end.error is not None:
            raise end.error
        left_s = end.ready_s - hub.clock()
        if left_s > 0:
            hub.sleep(left_s)
        if end.copied is not None:
            torch.cuda.current_stream(end.tensor.device).wait_event(end.copied)

    def _what(self) -> str:
        verb = "never sent" if self._receiving else "never posted a receive for"
        channel = self._end.message.channel
        peer = channel.source if self._receiving else channel.target
        return f"rank {peer} {verb} {describe(self._end.message)}"


def _record(tensor: Tensor) -> torch.cuda.Event | None:
    """Mark, on the caller's stream, the moment from which the tensor may be read or written."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _deliver(wire: _Wire, send: _End, receive: _End, rendezvous: bool) -> None:
    """Copy once, on the caller's stream, and stamp when the emulated link would be done."""
    if send.message != receive.message:
        text = (
            f"the sender's next is {describe(send.message)}, the receiver's next is "
            f"{describe(receive.message)}; both programs must come from one plan"
        )
        send.error = receive.error = TransportError(text)
    else:
        copied = _copy(send, receive)
        send.copied = receive.copied = copied
        if wire.delay is not None:
            start_s = max(send.at_s, wire.free_s, receive.at_s if rendezvous else send.at_s)
            num_bytes = send.tensor.numel() * send.tensor.element_size()
            if wire.delay.bytes_of is not None:
                num_bytes = wire.delay.bytes_of(send.message)
            wire.free_s = start_s + num_bytes / wire.delay.bytes_per_s
            send.ready_s = wire.free_s
            receive.ready_s = wire.free_s + wire.delay.latency_s
    send.done = receive.done = True


def _copy(send: _End, receive: _End) -> torch.cuda.Event | None:
    if receive.tensor.is_cuda:
        stream = torch.cuda.current_stream(receive.tensor.device)
        for end in (send, receive):
            if end.event is not None:
                stream.wait_event(end.event)
                end.tensor.record_stream(torch.cuda.current_stream(end.tensor.device))
    receive.tensor.copy_(send.tensor, non_blocking=receive.tensor.is_cuda)
    return _record(receive.tensor)

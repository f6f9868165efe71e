"""Transport over torch.distributed: gloo and nccl.

In:     as in `transport`; an initialised default process group.
Out:    one process group per channel (directed edge and lane): NCCL has no tags, and two directions
        in one communicator would wait for each other. gloo's tag counts the channel's messages.
gloo moves host memory only, so CUDA tensors go through pinned copies; several ranks can then share
one GPU. Under NCCL a wait orders the current stream after the transfer and the host runs on.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dpipe.core.errors import RankError, TransportError
from lightning_dpipe.core.program import Channel, Message
from lightning_dpipe.runtime.transport import Handle, check_end, check_fits, describe

_MAX_TAG = 2**31 - 1


@dataclass(slots=True, eq=False)
class _Edge:
    """An open channel that starts or ends at this rank."""

    group: dist.ProcessGroup
    peer: int
    next_tag: int = 0

    def tag(self) -> int:
        """Count the channel's messages; both ends count alike."""
        tag = self.next_tag
        self.next_tag = tag + 1 if tag < _MAX_TAG else 0
        return tag


class DistTransport:
    """This rank's messages over torch.distributed, for tensors on `device`.

    `timeout` is that of the channels' process groups, by default the default group's own.
    """

    def __init__(self, device: torch.device, *, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        self.device = device
        backend = backend_for(device)
        self._staged = device.type == "cuda" and backend == "gloo"
        self._uses_tags = backend == "gloo"
        self._timeout = timeout or default_timeout(device)
        self._known: set[Channel] = set()
        self._edges: dict[Channel, _Edge] = {}
        self._pool = _HostPool()

    def open(self, channels: Iterable[Channel]) -> None:
        """Create and warm one process group per new channel; collective over all ranks.

        Raises:
            TransportError: The ranks passed different lists.
            RankError: A peer is gone.
        """
        new = [c for c in dict.fromkeys(channels) if c not in self._known]
        self._agree(new)
        for channel in new:
            group = new_group((channel.source, channel.target), self._timeout)
            self._known.add(channel)
            if self.rank in (channel.source, channel.target):
                peer = channel.target if self.rank == channel.source else channel.source
                self._edges[channel] = _Edge(group=group, peer=peer)
        for channel in new:  # all ranks walk one list in one order: the next edge is never blocked
            self._warm(channel)

    def post(self, message: Message, buffer: Tensor) -> Handle:
        """Start receiving `message` into `buffer`."""
        check_end(message, self.rank, receiving=True)
        check_fits(message, buffer)
        edge = self._edge(message.channel)
        buffer = buffer.detach()
        host = self._pool.take(buffer) if self._staged else None
        target = buffer if host is None else host.tensor
        try:
            work = dist.irecv(target, edge.peer, edge.group, edge.tag() if self._uses_tags else 0)
        except RuntimeError as error:
            raise _lost(edge.peer, message) from error
        return _DistHandle(work, message, edge.peer, buffer, host, self._pool)

    def send(self, message: Message, tensor: Tensor) -> Handle:
        """Start sending `tensor`. A pinned copy (gloo with CUDA) first waits for the tensor."""
        check_end(message, self.rank, receiving=False)
        check_fits(message, tensor)
        edge = self._edge(message.channel)
        source = tensor.detach()
        host = self._pool.take(source) if self._staged else None
        if host is not None:
            host.tensor.copy_(source)  # gloo reads host memory at once: this copy has to be done
            source = host.tensor
        try:
            work = dist.isend(source, edge.peer, edge.group, edge.tag() if self._uses_tags else 0)
        except RuntimeError as error:
            raise _lost(edge.peer, message) from error
        return _DistHandle(work, message, edge.peer, None if host else source, host, self._pool)

    def close(self) -> None:
        """Destroy the channels' process groups."""
        for edge in self._edges.values():
            dist.destroy_process_group(edge.group)
        self._edges.clear()
        self._known.clear()

    def _edge(self, channel: Channel) -> _Edge:
        edge = self._edges.get(channel)
        if edge is None:
            raise TransportError(
                f"channel {channel.source} -> {channel.target} ({channel.lane.value}) is not open; "
                "pass it to open() on all ranks before the first step"
            )
        return edge

    def _agree(self, channels: list[Channel]) -> None:
        """Compare the lists first: different ones would hang in `new_group`."""
        text = ";".join(f"{c.source}>{c.target}:{c.lane.value}" for c in channels)
        mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        mine = torch.tensor([mark, len(channels)], device=collective_device(self.device))
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        pairs = [tuple(x.tolist()) for x in every]
        for rank, pair in enumerate(pairs):
            if pair != pairs[0]:
                raise TransportError(
                    f"rank 0 opens {pairs[0][1]} channels, rank {rank} opens {pair[1]} or others; "
                    "pass the same list in the same order on all ranks"
                )

    def _warm(self, channel: Channel) -> None:
        edge = self._edges.get(channel)
        if edge is None:
            return
        message = Message(channel=channel, tag="warm-up", shape=(1,), dtype="uint8")
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        start = self.send if channel.source == self.rank else self.post
        start(message, token).wait()


class _DistHandle:
    """Work and tensor, alive until the wait: a dropped Work loses its message silently."""

    __slots__ = ("_buffer", "_host", "_message", "_peer", "_pool", "_work")

    def __init__(
        self,
        work: dist.Work | None,
        message: Message,
        peer: int,
        buffer: Tensor | None,
        host: "_Host | None",
        pool: "_HostPool",
    ) -> None:
        self._work = work
        self._message = message
        self._peer = peer
        self._buffer = buffer
        self._host = host
        self._pool = pool

    def wait(self) -> None:
        """See `transport.Handle`."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(self._peer, self._message) from error
        if self._host is not None:
            self._host.busy = None
            if self._buffer is not None:  # a receive: on to the device, in stream order
                self._buffer.copy_(self._host.tensor, non_blocking=True)
                self._host.busy = torch.cuda.current_stream(self._buffer.device).record_event()
            self._pool.give(self._host)
        self._work = self._buffer = self._host = None


@dataclass(slots=True, eq=False)
class _Host:
    """A pinned tensor; `busy` is the device copy that may still read it."""

    tensor: Tensor
    busy: torch.cuda.Event | None = None


class _HostPool:
    """Pinned copies by shape and dtype, so that steady steps allocate none."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[_Host]] = {}

    def take(self, like: Tensor) -> _Host:
        free = self._free.get((like.shape, like.dtype))
        if free:
            host = free.pop()
            if host.busy is not None:
                host.busy.synchronize()
            return host
        return _Host(tensor=torch.empty(like.shape, dtype=like.dtype, pin_memory=True))

    def give(self, host: _Host) -> None:
        self._free.setdefault((host.tensor.shape, host.tensor.dtype), []).append(host)


def new_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group; collective over all ranks, also those that are not in it.

    Raises:
        RankError: One of `ranks` is gone.
    """
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout)
        return group
    except RuntimeError as error:
        raise RankError(
            f"ranks {list(ranks)} could not be connected: one of them failed or is gone; "
            "look for its own error first"
        ) from error


def backend_for(device: torch.device) -> str:
    """The default group's backend for tensors on `device`: ``gloo``, ``nccl``, ..."""
    config = dist.get_backend_config()  # "cpu:gloo,cuda:nccl", or one name
    if ":" not in config:
        return config
    return dict(pair.split(":") for pair in config.split(","))[device.type]


def default_timeout(device: torch.device) -> timedelta:
    """The default group's timeout, which `new_group` does not pass on by itself."""
    world = dist.group.WORLD
    assert world is not None, "DistTransport needs init_process_group first"
    timeout: timedelta = world._get_backend(collective_device(device)).options._timeout
    return timeout


def collective_device(device: torch.device) -> torch.device:
    """Where a small collective's tensor lives: on the host unless only the device has a backend."""
    config = dist.get_backend_config()
    return torch.device("cpu") if "cpu" in config or "gloo" in config else device


def _lost(peer: int, message: Message) -> RankError:
    return RankError(
        f"rank {peer} did not complete {describe(message)}: it failed, is gone or was too slow; "
        "look for its own error first"
    )

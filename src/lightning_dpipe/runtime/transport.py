"""How tensors get from rank to rank: the protocol that the engine sees.

In:     a Message (fixed at lowering) and a contiguous tensor of exactly its shape and dtype.
Out:    a Handle. Starting a transfer never blocks; `Handle.wait` does.
Two transports keep this contract: `threads` (one process) and `distributed` (gloo, nccl).
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from lightning_dpipe.core.errors import TransportError
from lightning_dpipe.core.graph import DTYPE_BYTES
from lightning_dpipe.core.program import Channel, Message

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


class Handle(Protocol):
    """One started transfer; it keeps its tensor alive until it is waited for."""

    def wait(self) -> None:
        """Return when the data is in the buffer (receive) or the tensor may be reused (send).

        On a GPU "when" is in the order of the current stream; the host is not held up.

        Raises:
            RankError: The peer failed, is gone, or did not answer in time.
        """


class Transport(Protocol):
    """Moves messages over channels. Each channel delivers in the order in which it was sent."""

    def open(self, channels: Iterable[Channel]) -> None:
        """Prepare channels. Collective: every rank passes the same list; known ones are skipped."""

    def post(self, message: Message, buffer: Tensor) -> Handle:
        """Start receiving `message` into `buffer`, which nobody may touch until the wait."""

    def send(self, message: Message, tensor: Tensor) -> Handle:
        """Start sending `tensor`, which nobody may change until the wait."""

    def close(self) -> None:
        """Release the channels. Outstanding handles are void."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that values and messages call by `name`."""
    return _DTYPES[name]


def check_fits(message: Message, tensor: Tensor) -> None:
    """Refuse a tensor that is not exactly what the message says.

    gloo aborts the receiving process on a larger message, leaves a stale tail on a smaller one and
    reinterprets the bytes of another dtype, so nothing may pass unchecked.

    Raises:
        TransportError: Shape, dtype or layout differ.
    """
    if tuple(tensor.shape) == message.shape and tensor.dtype is _DTYPES[message.dtype]:
        if tensor.is_contiguous():
            return
        raise TransportError(
            f"{describe(message)}: the tensor has strides {tensor.stride()}; pass a contiguous one"
        )
    raise TransportError(
        f"{describe(message)}: the tensor is {str(tensor.dtype).removeprefix('torch.')} "
        f"{list(tensor.shape)}; the layer's output differs from what the model was traced with"
    )


def check_end(message: Message, rank: int, *, receiving: bool) -> None:
    """Refuse to post or send a message that is not this rank's.

    Raises:
        TransportError: The channel does not start (send) or end (receive) here.
    """
    end = message.channel.target if receiving else message.channel.source
    if end != rank:
        verb = "receive" if receiving else "send"
        raise TransportError(
            f"rank {rank} cannot {verb} {describe(message)}, rank {end} does; "
            "run the program that was lowered for this rank"
        )


def describe(message: Message) -> str:
    """Name a message in an error: tag, edge, lane, shape and dtype."""
    channel = message.channel
    return (
        f"message {message.tag!r} (rank {channel.source} -> rank {channel.target}, "
        f"{channel.lane.value}, {message.dtype} {list(message.shape)})"
    )

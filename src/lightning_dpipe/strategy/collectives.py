"""What ranks tell each other outside the pipeline: integers, objects, whole tensors, on the host.

In:     an initialised default process group.
Out:    answers on every rank. Over NCCL the traffic takes a gloo group of its own, so that asking
        for a number never waits for a device. Calls come from the main thread, in the same order on
        all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dpipe.core.errors import DPipeError


class HostLink:
    """Host-side messages over all ranks; with one process it answers by itself."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if "gloo" not in dist.get_backend():
                self._group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: int) -> tuple[int, ...]:
        """One integer of every rank, by rank."""
        if self.world_size == 1:
            return (value,)
        mine = torch.tensor([value], dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(every, mine, group=self._group)
        return tuple(int(x) for x in every)

    def gather_objects(self, value: Any) -> list[Any]:
        """One picklable object of every rank, by rank."""
        if self.world_size == 1:
            return [value]
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, value, group=self._group)
        return every

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The picklable object of rank `source`."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, source, group=self._group)
        return box[0]

    def raise_together(self, error: Exception | None) -> None:
        """If any rank has an error, raise it on all: nobody is left waiting.

        Raises:
            Exception: This rank's own error, else the first other rank's (a DPipeError).
        """
        texts = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise DPipeError(f"rank {rank}: {text}")

    def compare(self, what: str, mark: str) -> None:
        """Check that all ranks hold the same thing.

        Raises:
            DPipeError: They do not; both digests are named.
        """
        marks = self.gather_objects(mark)
        for rank, other in enumerate(marks):
            if other != marks[0]:
                raise DPipeError(
                    f"{what} of rank {rank} is {other}, that of rank 0 is {marks[0]}; start all "
                    "ranks from the same code, configuration and weights"
                )

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a tensor whose shape and dtype the receiver knows, as bytes."""
        dist.send(_as_bytes(tensor.detach().cpu().contiguous()), target, group=self._group)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Receive a tensor into new host memory."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        dist.recv(_as_bytes(tensor), source, group=self._group)
        return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view on the tensor's memory, which gloo moves whatever the dtype is."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()


def move_to_root(
    link: HostLink, mine: Mapping[str, Tensor], owners: Mapping[str, int]
) -> dict[str, Tensor]:
    """Bring tensors to rank 0, one at a time, so that no rank holds more than it must.

    Args:
        link: Over all ranks; all of them take part.
        mine: This rank's tensors; those that rank 0 owns itself are not moved.
        owners: Which rank sends each tensor; the same mapping in the same order on all ranks.

    Returns:
        On rank 0 the tensors of the other owners, elsewhere nothing.
    """
    kinds = {
        name: (tuple(mine[name].shape), mine[name].dtype)
        for name, owner in owners.items()
        if owner == link.rank and owner != 0
    }
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for part in link.gather_objects(kinds):
        known |= part
    arrived = {}
    for name, owner in _others(owners):
        if link.rank == 0:
            arrived[name] = link.receive(*known[name], owner)
        elif link.rank == owner:
            link.send(mine[name], 0)
    return arrived


def _others(owners: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    return ((name, owner) for name, owner in owners.items() if owner != 0)

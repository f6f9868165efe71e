"""Ranks that each hold a band of rows of one image: how they swap edges and gather small things.

In:     tensors of the ranks of one image, rank 0 at the top. Out: the neighbours' rows; everyone's.
Two groups keep the protocol: threads of one process and torch.distributed. Every call is collective
and made in the same order on all ranks; shapes are known beforehand, so none are sent.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dpipe.core.errors import PlanError, RankError

T = TypeVar("T")


class BandGroup(Protocol):
    """Ranks of one image, from its top to its bottom."""

    @property
    def rank(self) -> int:
        """Own position, 0 at the top."""

    @property
    def size(self) -> int:
        """All of them."""

    def swap(self, first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Give own `first` rows to the rank above and `last` ones to the rank below.

        Returns:
            The last rows of the rank above and the first of the one below; None beyond the image.

        Raises:
            RankError: Another rank failed.
        """

    def gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Everyone's tensor, in rank order; ``shapes[r]`` is what rank r gives.

        Raises:
            RankError: Another rank failed.
        """


def even_bands(height: int, size: int) -> tuple[int, ...]:
    """Rows of every rank, as even as possible.

    Raises:
        PlanError: There are fewer rows than ranks.
    """
    if not 1 <= size <= height:
        raise PlanError(f"{height} rows for {size} ranks; use 1 to {height} ranks")
    return tuple((r + 1) * height // size - r * height // size for r in range(size))


def check_bands(bands: Sequence[int], height: int, size: int) -> None:
    """Refuse rows that are not an image's, one band a rank.

    Raises:
        PlanError: Their number, their sum or one of them is wrong.
    """
    if len(bands) != size or sum(bands) != height or min(bands, default=0) < 1:
        raise PlanError(
            f"bands {tuple(bands)} for {size} ranks and {height} rows; give each rank at least one "
            f"row and {height} in all"
        )


class OneBand:
    """The group of a single rank: the whole image."""

    rank = 0
    size = 1

    def swap(self, first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """There is nobody."""
        return None, None

    def gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Only one's own."""
        return [tensor]


@dataclass(frozen=True, slots=True)
class DistBands:
    """A process group of torch.distributed; None is all ranks."""

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Own position, 0 at the top."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """All of them."""
        return dist.get_world_size(self.group)

    def swap(self, first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `BandGroup.swap`."""
        above = torch.empty_like(last) if self.rank else None
        below = torch.empty_like(first) if self.rank + 1 < self.size else None
        work: list[dist.P2POp] = []
        edges = ((above, first, self.rank - 1), (below, last, self.rank + 1))
        for received, sent, peer in edges:
            if received is not None:
                other = self._global(peer)
                sent = sent.contiguous()
                work.append(dist.P2POp(dist.isend, sent, other, self.group))
                work.append(dist.P2POp(dist.irecv, received, other, self.group))
        for handle in dist.batch_isend_irecv(work) if work else ():
            handle.wait()
        return above, below

    def gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `BandGroup.gather`."""
        found = [tensor.new_empty(tuple(shape)) for shape in shapes]
        found[self.rank] = tensor.contiguous()
        for rank, given in enumerate(found):  # all_gather wants equal shapes, on gloo at least
            dist.broadcast(given, self._global(rank), group=self.group)
        return found

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


@dataclass(slots=True)
class _Shared:
    """What threads hand over: written by everyone, then read by everyone."""

    size: int
    barrier: threading.Barrier
    slots: list[tuple[Tensor, ...]] = field(default_factory=list)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ThreadBands:
    """One thread's end of a group of threads; `run_threads` makes them."""

    rank: int
    shared: _Shared

    @property
    def size(self) -> int:
        """All of them."""
        return self.shared.size

    def swap(self, first: Tensor, last: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """See `BandGroup.swap`."""
        given = self._exchange((first, last))
        above = given[self.rank - 1][1] if self.rank else None
        below = given[self.rank + 1][0] if self.rank + 1 < self.size else None
        return above, below

    def gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `BandGroup.gather`."""
        return [given for (given,) in self._exchange((tensor,))]

    def _exchange(self, mine: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        self.shared.slots[self.rank] = tuple(tensor.clone() for tensor in mine)
        self._wait()
        given = list(self.shared.slots)
        self._wait()
        return given

    def _wait(self) -> None:
        try:
            self.shared.barrier.wait()
        except threading.BrokenBarrierError:
            raise RankError(self.shared.failure or "another band did not answer in time") from None


def run_threads(size: int, work: Callable[[BandGroup], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run `work` on as many threads as ranks; what it returns, in rank order.

    Raises:
        Exception: What the first thread to fail raised; the others stop.
    """
    shared = _Shared(size, threading.Barrier(size, timeout=timeout_s))
    shared.slots = [()] * size
    errors: list[BaseException] = []

    def run(rank: int) -> T:
        try:
            return work(ThreadBands(rank, shared))
        except BaseException as error:
            errors.append(error)
            shared.failure = shared.failure or traceback.format_exc()
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]

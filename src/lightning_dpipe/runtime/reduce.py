"""Sum of gradients over the replicas of a stage, in the background.

In:     a stage's parameters, once their gradients are complete on this replica.
Out:    `p.grad` holds the sum over all replicas after `wait`. Whoever scales the loss by
        1 / (global batch) needs no division here.
The order of parameters, buckets and summation is fixed, so two runs of one plan are bit-identical.
Small gradients travel in flat buckets (DDP, arXiv 2006.15704), large ones in place.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpipe.core.errors import RankError
from lightning_dpipe.runtime.distributed import default_timeout, new_group
from lightning_dpipe.runtime.threads import ThreadHub

SMALL_BYTES = 1 << 20
"""Gradients below this size share a bucket; larger ones are summed where they are."""

BUCKET_BYTES = 32 << 20
"""A bucket is sent off when it would grow beyond this size."""


class Reducer(Protocol):
    """Sums gradients over replicas. All replicas start the same stages in the same order.

    A parameter without gradient here counts as zero; one without gradient on every replica stays
    without, as it would in one process.
    """

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start summing; nobody may touch these gradients until `wait`."""

    def wait(self) -> None:
        """Finish everything that was started.

        Raises:
            RankError: A replica failed or is gone.
        """


@dataclass(slots=True, eq=False)
class _Bucket:
    """A flat buffer, allocated once; `views` are its pieces in the parameters' shapes."""

    flat: Tensor
    parameters: tuple[nn.Parameter, ...]
    views: tuple[Tensor, ...]

    def fill(self) -> None:
        """Copy the gradients in; absent ones are zeros."""
        with_grad = [(v, p.grad) for v, p in zip(self.views, self.parameters, strict=True)]
        copies = [(view, grad) for view, grad in with_grad if grad is not None]
        if len(copies) < len(with_grad):
            torch._foreach_zero_([view for view, grad in with_grad if grad is None])
        if copies:
            torch._foreach_copy_([view for view, _ in copies], [grad for _, grad in copies])

    def scatter(self) -> None:
        """Copy the sums back into the gradients, making those that were absent."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if grads:
            torch._foreach_copy_(grads, list(self.views))


@dataclass(slots=True, eq=False)
class _Layout:
    """How the gradients of one `start` travel: buckets, single ones, and who has any.

    ``present[i]`` is summed like a gradient and tells on how many replicas parameter i has one.
    It is the tail of the first bucket, so that it costs no message of its own.
    """

    parameters: tuple[nn.Parameter, ...]
    buckets: tuple[_Bucket, ...]
    large: tuple[nn.Parameter, ...]
    present: Tensor
    absent: tuple[int, ...] = ()
    works: list[dist.Work | None] = field(default_factory=list)

    def start(self, group: dist.ProcessGroup) -> None:
        grads = [p.grad for p in self.parameters]
        self.absent = tuple(i for i, grad in enumerate(grads) if grad is None)
        self.present.fill_(1)
        for index in self.absent:
            self.present[index] = 0
        for parameter in self.large:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            self.works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
        for bucket in self.buckets:
            bucket.fill()
            self.works.append(dist.all_reduce(bucket.flat, group=group, async_op=True))

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()
        self.works.clear()
        for bucket in self.buckets:
            bucket.scatter()
        if self.absent:  # rare, and the only case in which the host has to look at a device value
            counts = self.present.tolist()
            for index in self.absent:
                if not counts[index]:
                    self.parameters[index].grad = None


def _layout(parameters: Sequence[nn.Parameter]) -> _Layout:
    """Cut a stage's parameters into buckets by dtype and device, in the given order."""
    chosen = tuple(p for p in parameters if p.requires_grad)
    small: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for parameter in chosen:
        if _num_bytes(parameter) < SMALL_BYTES:
            lists = small.setdefault((parameter.dtype, parameter.device), [[]])
            if sum(map(_num_bytes, lists[-1])) + _num_bytes(parameter) > BUCKET_BYTES:
                lists.append([])
            lists[-1].append(parameter)
    packs = [pack for lists in small.values() for pack in lists]
    large = tuple(p for p in chosen if _num_bytes(p) >= SMALL_BYTES)
    buckets, present = [], torch.empty(0)
    if not chosen:
        return _Layout(parameters=(), buckets=(), large=(), present=present)
    for index, pack in enumerate(packs or [[]]):
        tail = len(chosen) if index == 0 else 0
        like = pack[0] if pack else large[0]
        numel = sum(p.numel() for p in pack)
        flat = torch.zeros(numel + tail, dtype=like.dtype, device=like.device)
        pieces = torch.split(flat[:numel], [p.numel() for p in pack]) if pack else ()
        views = tuple(v.view_as(p) for v, p in zip(pieces, pack, strict=True))
        buckets.append(_Bucket(flat=flat, parameters=tuple(pack), views=views))
        present = flat[numel:] if index == 0 else present
    return _Layout(parameters=chosen, buckets=tuple(buckets), large=large, present=present)


def _num_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


class DistReducer:
    """Sums over a torch.distributed group: the ranks that hold the same stages."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._started: list[_Layout] = []

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Reducer`."""
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:  # the layout keeps the parameters, so their ids stay taken
            layout = self._layouts.setdefault(key, _layout(parameters))
        if not layout.parameters:
            return
        self._started.append(layout)
        try:
            with torch.no_grad():
                layout.start(self._group)
        except RuntimeError as error:
            raise self._lost() from error

    def wait(self) -> None:
        """See `Reducer`."""
        started, self._started = self._started, []
        try:
            with torch.no_grad():
                for layout in started:
                    layout.wait()
        except RuntimeError as error:
            raise self._lost() from error

    def _lost(self) -> RankError:
        return RankError(
            f"the gradient sum over ranks {list(self._ranks)} did not complete: one of them "
            "failed, is gone or was too slow; look for its own error first"
        )


def open_reducer(
    replica_sets: Sequence[Sequence[int]], rank: int, device: torch.device
) -> DistReducer | None:
    """Make the groups that sum gradients; collective over all ranks.

    Args:
        replica_sets: Ranks that hold the same stages, as in `Plan.replica_sets`.
        rank: This global rank.
        device: Where the gradients are.

    Returns:
        This rank's reducer, or None when it has no replica.
    """
    mine = None
    for ranks in replica_sets:
        if len(ranks) > 1:
            group = new_group(tuple(ranks), default_timeout(device))
            if rank in ranks:
                mine = DistReducer(group, tuple(ranks))
    if mine is None:
        return None
    first = nn.Parameter(torch.zeros(1, device=device))
    first.grad = torch.zeros_like(first)
    mine.start([first])  # makes the communicator now, not in the middle of a schedule
    mine.wait()
    return mine


class ThreadReduction:
    """Joins the reducers of one stage's replicas in one process; sums in replica order."""

    def __init__(self, hub: ThreadHub, num_replicas: int) -> None:
        self.hub = hub
        self.num_replicas = num_replicas
        self.condition: threading.Condition = hub.condition()
        self.rounds: dict[int, _Round] = {}

    def reducer(self, replica: int) -> "ThreadReducer":
        """The reducer of one replica."""
        return ThreadReducer(self, replica)


@dataclass(slots=True, eq=False)
class _Round:
    """One `start` on all replicas: their gradients, then the sums."""

    grads: dict[int, list[Tensor | None]] = field(default_factory=dict)
    sums: list[Tensor | None] | None = None
    num_taken: int = 0


class ThreadReducer:
    """One replica's access to a ThreadReduction."""

    def __init__(self, reduction: ThreadReduction, replica: int) -> None:
        self._reduction = reduction
        self._replica = replica
        self._next = 0
        self._started: list[tuple[int, tuple[nn.Parameter, ...]]] = []

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Reducer`."""
        reduction = self._reduction
        chosen = tuple(p for p in parameters if p.requires_grad)
        self._started.append((self._next, chosen))
        with reduction.condition:
            part = reduction.rounds.setdefault(self._next, _Round())
            part.grads[self._replica] = [p.grad for p in chosen]
            if len(part.grads) == reduction.num_replicas:
                columns = zip(*(part.grads[r] for r in sorted(part.grads)), strict=True)
                part.sums = [_sum(column) for column in columns]
                reduction.condition.notify_all()
        self._next += 1

    def wait(self) -> None:
        """See `Reducer`."""
        started, self._started = self._started, []
        for number, parameters in started:
            self._finish(number, parameters)

    def _finish(self, number: int, parameters: tuple[nn.Parameter, ...]) -> None:
        reduction = self._reduction
        part = reduction.rounds[number]
        with reduction.condition:
            reduction.hub.wait_for(
                reduction.condition,
                lambda: part.sums is not None,
                lambda: (
                    f"gradient sum {number}: only replicas {sorted(part.grads)} of "
                    f"{reduction.num_replicas} started it"
                ),
            )
            part.num_taken += 1
            if part.num_taken == reduction.num_replicas:
                del reduction.rounds[number]
        for parameter, total in zip(parameters, part.sums or (), strict=True):
            if total is not None and parameter.grad is not None:
                parameter.grad.copy_(total)
            elif total is not None:
                parameter.grad = total.clone()


def _sum(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Add in the order of the replicas; None counts as zero, only Nones stay None."""
    total = None
    for grad in grads:
        if grad is not None:
            total = grad.clone() if total is None else total.add_(grad)
    return total

"""Loaders on which all ranks agree: how many batches, how large, and which batch comes next.

In:     this rank's loader, and `exchange`, which gathers one integer of every rank.
Out:    the same batches, each announced to the strategy by an `Outlook` just before it is yielded.

Ranks of a pipeline need each other in every step, so none may start one that another rank does not
join. With `ahead` one batch is held back, also across epochs, so that its frozen work can run in
the bubbles of the step before it.
"""

import functools
import logging
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lightning_dpipe.core.buckets import BASE, agreed_bucket
from lightning_dpipe.core.errors import DPipeError, UnsupportedError

log = logging.getLogger(__name__)

_ENDED = -1
_UNSIZED = -2
_REFUSED = -3
_SIZE_BITS = 32
"""A batch is announced as one integer: its size, and above these bits the index of its class."""

_CLASS_BITS = 16
_GROUPS_AT = _SIZE_BITS + _CLASS_BITS
"""The bits from here on say which groups of kept encodings are at hand for the whole batch."""

MOST_GROUPS = 63 - _GROUPS_AT
"""So many groups can be announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a cache has of batch `number`: by group, ``[batch, ...]`` tensors by value."""

    number: int
    groups: Mapping[int, Mapping[int, Any]]

    @property
    def mask(self) -> int:
        """The groups as bits."""
        return sum(1 << group for group in self.groups)

    def only(self, mask: int) -> "Kept | None":
        """What all ranks have; None: nothing."""
        left = {group: values for group, values in self.groups.items() if mask >> group & 1}
        return replace(self, groups=left) if left else None

    def of(self, number: int) -> Mapping[int, Mapping[int, Any]] | None:
        """The groups, unless the batch has become another one: then its draws are others."""
        return self.groups if number == self.number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What all ranks know about a batch; `ticket` and `next_ticket` say which batch is which.

    `sizes` are local batch sizes by global rank, `bucket` is the shape class of every rank's batch.
    Without a next batch the `next_` fields are None. `kept` and `next_kept` are what a cache has of
    this rank's batches, given on all ranks or on none.
    """

    ticket: int
    sizes: tuple[int, ...]
    next_ticket: int | None = None
    next_batch: Any = None
    next_sizes: tuple[int, ...] | None = None
    bucket: str = BASE
    next_bucket: str = BASE
    kept: Kept | None = None
    next_kept: Kept | None = None


class Looker(Protocol):
    """Looks training batches up in a cache; see `strategy.cache.recall`."""

    def __call__(self, batch: Any, ahead: int) -> Kept | None:
        """What is kept of the batch; `ahead` is 1 if another one is announced before it."""

    def settle(self, loader: Any) -> None:
        """Wait for all ranks' entries; refuse data that is never the same again. Collective."""


class Outlooks:
    """Announced batches that no step has run yet, oldest first: of training and of evaluation.

    `recall` looks training batches up before they are announced, if there is a cache.
    """

    def __init__(self) -> None:
        self.recall: Looker | None = None
        self.training: deque[Outlook] = deque()
        self.evaluation: deque[Outlook] = deque()

    def announce(self, outlook: Outlook, training: bool) -> None:
        """Take note of a batch that a loader is about to yield."""
        (self.training if training else self.evaluation).append(outlook)


@dataclass(frozen=True, kw_only=True)
class LoaderLinks:
    """What a loader needs from the strategy.

    `exchange` gathers one integer of every rank, by rank. `num_samples` counts a batch's samples.
    `announce` receives the outlook of the batch that is yielded next; `clear` is called when an
    epoch starts. `limit` is the number of batches that the loop takes from one epoch. `next_epoch`
    is the number of the epoch after this one, or None when training ends here. `bucket_of` tells
    a batch's shape class, one of `buckets`, or raises; `raise_together` makes that every rank's.
    `recall` looks a batch up in a cache: 1 if another one is announced before it, else 0; `settle`
    comes before an epoch's first look.
    """

    exchange: Callable[[int], tuple[int, ...]]
    num_samples: Callable[[Any], int]
    announce: Callable[[Outlook], None]
    clear: Callable[[], None]
    limit: Callable[[], float]
    next_epoch: Callable[[], int | None] = lambda: None
    buckets: tuple[str, ...] = (BASE,)
    bucket_of: Callable[[Any], str] = lambda batch: BASE
    raise_together: Callable[[Exception | None], None] = lambda error: _raise(error)
    recall: Callable[[Any, int], Kept | None] = lambda batch, ahead: None
    settle: Callable[[], None] = lambda: None


class AgreedLoader:
    """Wraps a loader of one rank; all other attributes are the wrapped loader's.

    A training loader that ends early on one rank ends on all, with a warning. In evaluation that
    would silently leave samples out, so unequal ranks are refused there (`strict`).
    """

    def __init__(
        self, loader: Any, links: LoaderLinks, *, name: str, ahead: bool, strict: bool
    ) -> None:
        self.loader = loader
        self.links = links
        self.name = name
        self.ahead = ahead
        self.strict = strict
        self._tickets = 0
        self._prepared: tuple[int, _Source] | None = None
        self._state: dict[str, Any] | None = None
        self._length = self._agree_on_length()

    def __getattr__(self, name: str) -> Any:
        # `vars` and not `self.loader`: copy and pickle look attributes up before __init__ has run.
        return getattr(vars(self).get("loader"), name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the {self.name} loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()

    def _agree_on_length(self) -> int | None:
        try:
            mine = len(self.loader)
        except (TypeError, NotImplementedError):  # an iterable loader without a length
            mine = _UNSIZED
        lengths = self.links.exchange(mine)
        if min(lengths) < 0:
            return None
        if len(set(lengths)) > 1:
            self._unequal(f"the ranks have {list(lengths)} batches")
        return min(lengths)

    def _unequal(self, what: str) -> None:
        advice = "give every rank the same number of batches (a DistributedSampler pads)"
        if self.strict:
            raise UnsupportedError(f"{self.name} loader: {what}; {advice}")
        log.warning("%s loader: %s; all ranks stop at the shortest: %s", self.name, what, advice)

    def _epoch(self) -> Iterator[Any]:
        self.links.clear()
        source = self._open()
        current = source.first if source.first is not None else self._take(source, 0)
        count = 0
        while current is not None:
            count += 1
            following = self._following(source, count) if self.ahead else None
            self.links.announce(
                Outlook(
                    ticket=current.ticket,
                    sizes=current.sizes,
                    next_ticket=following.ticket if following else None,
                    next_batch=following.batch if following else None,
                    next_sizes=following.sizes if following else None,
                    bucket=current.bucket,
                    next_bucket=following.bucket if following else BASE,
                    kept=current.kept,
                    next_kept=following.kept if following else None,
                )
            )
            yield current.batch
            if self.ahead:
                current = following if self._prepared is None else None
            else:
                current = self._take(source, 0)

    def _open(self) -> "_Source":
        """Start an epoch: with the iterator made ahead for it, or a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == self._epoch_of_sampler(prepared[0]):
            return prepared[1]
        self.links.settle()
        return _Source(iter(self.loader))

    def _following(self, source: "_Source", count: int) -> "_Batch | None":
        """Fetch the batch after the current one, from the next epoch when this one ends here."""
        snapshot = getattr(self.loader, "state_dict", None)
        self._state = snapshot() if snapshot is not None else None
        if count < self.links.limit() and (batch := self._take(source, 1)) is not None:
            return batch
        epoch = self.links.next_epoch()
        if epoch is None:
            return None
        for sampler in self._samplers():
            sampler.set_epoch(epoch)
        self.links.settle()
        upcoming = _Source(iter(self.loader))
        upcoming.first = self._take(upcoming, 1)
        self._prepared = (epoch, upcoming)
        return upcoming.first

    def _take(self, source: "_Source", ahead: int) -> "_Batch | None":
        """Take one batch on every rank, or none on any; `ahead` as in `LoaderLinks.recall`."""
        batch = next(source.iterator, None)
        mine, error, kept = _ENDED, None, None
        if batch is not None:
            try:
                index = self.links.buckets.index(self.links.bucket_of(batch))
                mine = (index << _SIZE_BITS) + self.links.num_samples(batch)
                kept = self.links.recall(batch, ahead)
                mine += 0 if kept is None else kept.mask << _GROUPS_AT
            except DPipeError as refused:
                mine, error = _REFUSED, refused
        told = self.links.exchange(mine)
        if _REFUSED in told:
            self.links.raise_together(error)
        sizes = tuple(x if x < 0 else x & ((1 << _SIZE_BITS) - 1) for x in told)
        if min(sizes) > 0:
            self._tickets += 1
            names = self.links.buckets
            classes = [x >> _SIZE_BITS & (1 << _CLASS_BITS) - 1 for x in told]
            bucket = agreed_bucket(names, {r: names[c] for r, c in enumerate(classes)})
            if kept is not None:
                kept = kept.only(functools.reduce(operator.and_, (x >> _GROUPS_AT for x in told)))
            return _Batch(ticket=self._tickets, batch=batch, sizes=sizes, bucket=bucket, kept=kept)
        if max(sizes) != _ENDED:
            ended = [rank for rank, size in enumerate(sizes) if size <= 0]
            self._unequal(f"ranks {ended} have no batch left, the others do")
        return None

    def _samplers(self) -> list[Any]:
        """Every sampler that shuffles by epoch."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        found = (
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        unique = {id(s): s for s in found if callable(getattr(s, "set_epoch", None))}
        return list(unique.values())

    def _epoch_of_sampler(self, default: int) -> int:
        """The epoch that Lightning has set, where a sampler knows one."""
        epochs = [s.epoch for s in self._samplers() if isinstance(getattr(s, "epoch", None), int)]
        return epochs[0] if epochs else default


class StatefulLoader(AgreedLoader):
    """For a loader with ``state_dict``: its state as of the batch yielded, not of the one held."""

    def state_dict(self) -> dict[str, Any]:
        """State to resume from after the batch that was yielded last."""
        state: dict[str, Any] = self.loader.state_dict() if self._state is None else self._state
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand a saved state to the loader."""
        self._prepared = None
        self.loader.load_state_dict(state)


def agreed(
    loader: Any, links: LoaderLinks, *, name: str, ahead: bool = False, strict: bool = False
) -> AgreedLoader:
    """Wrap a loader. Collective: every rank wraps its own loaders in the same order.

    Raises:
        UnsupportedError: `strict`, and the ranks have different numbers of batches.
    """
    stateful = all(hasattr(loader, method) for method in ("state_dict", "load_state_dict"))
    kind = StatefulLoader if stateful else AgreedLoader
    return kind(loader, links, name=name, ahead=ahead, strict=strict)


@dataclass(slots=True, kw_only=True)
class _Batch:
    ticket: int
    batch: Any
    sizes: tuple[int, ...]
    bucket: str
    kept: Kept | None


class _Source:
    """An epoch's iterator, and its first batch when that was fetched ahead."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.first: _Batch | None = None


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error

"""The agreed loader against the plain loader's own batches."""

import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dpipe.core.errors import DataError, DPipeError, SpecError, UnsupportedError
from lightning_dpipe.strategy.lookahead import AgreedLoader, LoaderLinks, Outlook, agreed


class Desk:
    """A strategy's side, one rank."""

    def __init__(self, *, limit: float = float("inf"), epochs: int = 1) -> None:
        self.seen: list[Outlook] = []
        self.epoch, self.epochs, self.limit = 0, epochs, limit
        self.cleared = 0
        self.links = LoaderLinks(
            exchange=lambda value: (value,),
            num_samples=len,
            announce=self.seen.append,
            clear=self.clear,
            limit=lambda: self.limit,
            next_epoch=lambda: self.epoch + 1 if self.epoch + 1 < self.epochs else None,
        )

    def clear(self) -> None:
        self.cleared += 1

    def run(self, loader: AgreedLoader, sampler: Any = None) -> list[list[int]]:
        """What Lightning does: set the epoch, iterate up to the limit."""
        batches = []
        for epoch in range(self.epochs):
            self.epoch = epoch
            if sampler is not None:
                sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                batches.append(batch.tolist())
                if i + 1 >= self.limit:
                    break
        return batches


def shuffled(count: int = 10, batch_size: int = 4, workers: int = 0) -> tuple[Any, Any]:
    data = torch.arange(count)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler, num_workers=workers)
    return loader, sampler


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limit", [float("inf"), 1, 2])
def test_batches_are_the_loaders_own_over_epochs(ahead: bool, limit: float) -> None:
    plain, sampler = shuffled()
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += [b.tolist() for i, b in enumerate(plain) if i < limit]
    loader, sampler = shuffled()
    desk = Desk(limit=limit, epochs=3)
    wrapped = agreed(loader, desk.links, name="train", ahead=ahead, strict=False)
    assert desk.run(wrapped, sampler) == expected


def test_the_next_batch_is_announced_also_across_epochs_and_not_after_the_last() -> None:
    loader, sampler = shuffled()
    desk = Desk(epochs=3)
    wrapped = agreed(loader, desk.links, name="train", ahead=True, strict=False)
    batches = desk.run(wrapped, sampler)
    announced = [o.next_batch.tolist() for o in desk.seen[:-1]]
    assert announced == batches[1:]
    assert [o.next_ticket for o in desk.seen] == [o.ticket for o in desk.seen[1:]] + [None]
    assert [o.next_sizes for o in desk.seen[:-1]] == [o.sizes for o in desk.seen[1:]]
    assert desk.seen[-1].next_batch is None
    assert desk.cleared == 3


def test_an_epoch_that_is_not_the_announced_one_starts_afresh() -> None:
    loader, sampler = shuffled()
    desk = Desk(epochs=9)
    wrapped = agreed(loader, desk.links, name="train", ahead=True, strict=False)
    sampler.set_epoch(0)
    list(wrapped)
    sampler.set_epoch(5)
    got = [b.tolist() for b in wrapped]
    plain, other = shuffled()
    other.set_epoch(5)
    assert got == [b.tolist() for b in plain]
    assert desk.seen[2].ticket != desk.seen[1].next_ticket


def on_two_ranks(loaders: list[Any], *, buckets: Any = None, **kwargs: Any) -> list[Any]:
    """Run two ranks as threads; returns batches or the error of each."""
    classes: dict[str, Any] = {} if buckets is None else {
        "buckets": ("base", "wide"), "bucket_of": buckets
    }  # fmt: skip
    announced: list[list[Outlook]] = [[], []]
    barrier, box = threading.Barrier(2, timeout=5), [0, 0]
    results: list[Any] = [None, None]

    def body(rank: int) -> None:
        def exchange(value: int) -> tuple[int, ...]:
            box[rank] = value
            barrier.wait()
            both = tuple(box)
            barrier.wait()
            return both

        def raise_together(error: Exception | None) -> None:
            exchange(0)  # collective on both
            raise error or DPipeError("the other rank's")

        links = LoaderLinks(
            exchange=exchange,
            num_samples=len,
            announce=announced[rank].append,
            clear=lambda: None,
            limit=lambda: float("inf"),
            raise_together=raise_together,
            **classes,
        )
        try:
            wrapped = agreed(loaders[rank], links, name="train", **kwargs)
            results[rank] = [b.tolist() for b in wrapped]
            if buckets is not None:
                results[rank] = announced[rank]
        except DPipeError as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


class Stream:
    """An iterable without a length."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((n,), n) for n in self.sizes)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_that_ends_early_ends_all_with_a_warning(
    ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        results = on_two_ranks([Stream([3, 2, 1]), Stream([3, 2])], ahead=ahead, strict=False)
    assert [len(r) for r in results] == [2, 2]
    assert "ranks [1] have no batch left" in caplog.text


def test_unequal_lengths_are_cut_in_training_and_refused_in_evaluation() -> None:
    def loaders() -> list[Any]:
        return [
            DataLoader(torch.arange(6), batch_size=2),
            DataLoader(torch.arange(4), batch_size=2),
        ]

    assert [len(r) for r in on_two_ranks(loaders(), ahead=False, strict=False)] == [2, 2]
    for error in on_two_ranks(loaders(), ahead=False, strict=True):
        assert isinstance(error, UnsupportedError)
        assert "have [3, 2] batches" in str(error)


def by_size(batch: torch.Tensor) -> str:
    if len(batch) == 9:
        raise SpecError("no class has 9 columns")
    return "wide" if len(batch) % 2 else "base"


@pytest.mark.parametrize("ahead", [False, True])
def test_the_class_travels_with_the_size(ahead: bool) -> None:
    loaders = [Stream([2, 3, 4]), Stream([4, 1, 2])]
    for seen in on_two_ranks(loaders, buckets=by_size, ahead=ahead, strict=False):
        assert [o.sizes for o in seen] == [(2, 4), (3, 1), (4, 2)]
        assert [o.bucket for o in seen] == ["base", "wide", "base"]
        after = ["wide", "base", "base"] if ahead else ["base"] * 3
        assert [o.next_bucket for o in seen] == after


def test_ranks_of_other_classes_and_unknown_shapes_are_refused_on_both() -> None:
    mixed = on_two_ranks([Stream([2]), Stream([3])], buckets=by_size, ahead=True, strict=False)
    for error in mixed:
        assert isinstance(error, DataError)
        assert "'base' on ranks [0], 'wide' on ranks [1]" in str(error)
    first, second = on_two_ranks(
        [Stream([2, 2]), Stream([2, 9])], buckets=by_size, ahead=True, strict=False
    )
    assert isinstance(second, SpecError)
    assert str(first) == "the other rank's"


def test_the_wrapper_copies_and_shows_the_loaders_attributes() -> None:
    loader, sampler = shuffled()
    wrapped = agreed(loader, Desk().links, name="train", ahead=True, strict=False)
    assert copy.copy(wrapped).sampler is sampler
    assert wrapped.batch_size == 4
    assert len(wrapped) == len(loader)
    unsized = agreed(Stream([1]), Desk().links, name="train", ahead=True, strict=False)
    with pytest.raises(TypeError, match="has no length"):
        len(unsized)


def test_a_stateful_loaders_state_is_of_the_batch_yielded_not_of_the_one_held() -> None:
    class Stateful(Stream):
        at = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            for n in self.sizes:
                self.at += 1
                yield torch.full((n,), n)

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    wrapped = agreed(Stateful([1, 1, 1]), Desk().links, name="t", ahead=True, strict=False)
    states = [wrapped.state_dict()["at"] for _ in wrapped]
    assert states == [1, 2, 3]
    wrapped.load_state_dict({"at": 7})
    assert wrapped.loader.at == 7
    plain = agreed(Stream([1]), Desk().links, name="t")
    assert not hasattr(plain, "state_dict")

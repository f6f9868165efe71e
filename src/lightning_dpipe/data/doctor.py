"""What training would make of a data set, without training.

In:     a datamodule, and the number of ranks.
Out:    a `Report`: faults of all files (each is decoded), samples, shape classes, steps of an
        epoch, and every reason for which training would refuse to start.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.buckets import BucketTally, tally_buckets
from lightning_dpipe.data.conditions import cut_captions
from lightning_dpipe.data.faults import Fault, Kind, Verdict
from lightning_dpipe.data.inventory import Check, Inventory, Progress
from lightning_dpipe.data.stored import StoredDataModule, too_few


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A set as it lies on disk, or one of its splits."""

    where: str
    num_usable: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found.

    `reasons` say why training would refuse; empty if it would run. `sides` are (height, width) by
    shape class, None where samples are not files. The tally counts one epoch over all ranks.
    """

    parts: tuple[Part, ...]
    num_train: int
    num_validation: int
    batch_size: int
    num_ranks: int
    drop_last: bool
    tally: tuple[BucketTally, ...]
    sides: Mapping[str, tuple[int, int]] | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps of one epoch."""
        return sum(t.num_batches for t in self.tally)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Those of all parts."""
        return tuple(fault for part in self.parts for fault in part.faults)


def examine(
    data: Any, *, num_ranks: int, progress: Callable[[str], Progress], needs_tokenizer: bool = True
) -> Report:
    """Look at everything that training from `data` would read.

    Args:
        data: A `StoredDataModule`; of any other datamodule only samples are counted.
        num_ranks: Ranks that share the data.
        progress: Makes the progress of one part, by its name.
        needs_tokenizer: Whether captions without a tokenizer are a reason to refuse.
    """
    if not isinstance(data, StoredDataModule):
        return _count(data, num_ranks)
    reasons: list[str] = []
    notes: list[str] = []
    taken: dict[str, Inventory] = {}
    for part in data.parts():
        try:
            taken[part] = data.take(part, depth=Check.DECODE, progress=progress(part))
        except DataError as error:
            reasons.append(str(error))
    if getattr(data, "tokenizer", BASE) is None:
        text = "captions were not counted in tokens: no tokenizer is given (model.pretrained=)"
        (reasons if needs_tokenizer else notes).append(text)
    elif hasattr(data, "tokenizer"):
        taken = {part: _with_cut_captions(data, whole) for part, whole in taken.items()}
    found = [f for whole in taken.values() for f in whole.faults]
    refused = sum(f.verdict is Verdict.REFUSED for f in found)
    if refused:
        reasons.append(f"{refused} faults that training refuses, listed under their kinds")
    train, validation = _split(data, taken, reasons)
    tally = _tally(data, train, num_ranks, reasons)
    if train.samples and len(train.samples) < data.batch_size * num_ranks:
        notes.append(too_few(len(train.samples), data.batch_size, num_ranks))
    return Report(
        parts=tuple(
            Part(where=w.where, num_usable=len(w.samples), faults=w.faults) for w in taken.values()
        ),
        num_train=len(train.samples),
        num_validation=len(validation.samples),
        batch_size=data.batch_size,
        num_ranks=num_ranks,
        drop_last=data.options.drop_last,
        tally=tally,
        sides=data.options.sides,
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


def _split(
    data: StoredDataModule, taken: Mapping[str, Inventory], reasons: list[str]
) -> tuple[Inventory, Inventory]:
    """The splits as they would be if what training refuses were left out."""
    nothing = Inventory(where="", samples=(), buckets=(), faults=())
    if len(taken) < len(data.parts()):
        return nothing, nothing
    usable = {part: replace(whole, faults=()) for part, whole in taken.items()}
    try:
        train, validation = data.split(usable)
        for part, training in ((train, True), (validation, False)):
            data.check_conditions(part.samples, training=training)
    except DataError as error:
        reasons.append(str(error))
        return nothing, nothing
    return train, validation


def _tally(
    data: StoredDataModule, train: Inventory, num_ranks: int, reasons: list[str]
) -> tuple[BucketTally, ...]:
    if not train.samples:
        return ()
    try:
        return data.tally(train, num_replicas=num_ranks)
    except DataError as error:
        reasons.append(str(error))
        return ()


def _with_cut_captions(data: Any, whole: Inventory) -> Inventory:
    faults = tuple(
        Fault(
            kind=Kind.CAPTION_CUT,
            where=str(sample.path),
            text=f"{sample.path} has a caption of {count} tokens; what is after the first "
            f"{data.num_tokens} is cut off",
            verdict=Verdict.USED,
        )
        for sample, count in cut_captions(whole.samples, data.tokenizer, data.num_tokens)
    )
    return replace(whole, faults=whole.faults + faults)


def _count(data: Any, num_ranks: int) -> Report:
    """Batches of a datamodule that is not made of files."""
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader()
    train, validation = (_length(loader) for loader in loaders)
    size, drop_last = int(loaders[0].batch_size or 1), bool(loaders[0].drop_last)
    tally = tally_buckets(
        {BASE: train}, batch_size=size, num_replicas=num_ranks, drop_last=drop_last
    )
    reasons: Sequence[str] = ()
    if not any(t.num_batches for t in tally):
        reasons = (too_few(train, size, num_ranks) + "; with drop_last=true nothing is left",)
    return Report(
        parts=(),
        num_train=train,
        num_validation=validation,
        batch_size=size,
        num_ranks=num_ranks,
        drop_last=drop_last,
        tally=tally,
        sides=None,
        reasons=tuple(reasons),
        notes=(f"{type(data).__name__} is not made of files: only its batches are counted",),
    )


def _length(loader: Any) -> int:
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, Sized):
        raise DataError(f"{type(dataset).__name__} has no length, so its batches are not known")
    return len(dataset)

"""Datamodules of samples on disk, decoded when they are read.

In:     a reader's listing, what files are decoded with, and the conditions of samples.
Out:    batches. Which samples are trained on is decided once, in `setup`, before anything is
        trained: by rank 0 for all ranks.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.buckets import BucketBatchSampler, BucketTally, tally_buckets
from lightning_dpipe.data.conditions import Conditions
from lightning_dpipe.data.faults import Broken, Missing, Policy, settled
from lightning_dpipe.data.images import Probe, decode_image, probe_image
from lightning_dpipe.data.inventory import (
    Check,
    Inventory,
    Look,
    Progress,
    Told,
    left_out,
    take_inventory,
)
from lightning_dpipe.data.resumable import ResumableLoader
from lightning_dpipe.data.samples import Listing, Sample, Stored

log = logging.getLogger(__name__)

ALL, TRAIN, VALIDATION = ".", "train", "validation"
"""Parts of a set on disk: all of it, or one of two splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How a stored file becomes a tensor.

    `probe` looks at a file without its pixels, `decode` makes a tensor of the shape class' sides;
    `field` is its batch field.
    """

    field: str
    probe: Callable[..., Probe]
    decode: Callable[[Stored, tuple[int, int]], Tensor]


IMAGE = Decoder(field="image", probe=probe_image, decode=decode_image)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOptions:
    """What all datamodules of stored samples are told.

    Attributes:
        batch_size: Samples per device and step.
        size: Side of the images in pixels: the centre square, resized.
        num_validation: Samples held out, evenly over the set, when it is not split on disk.
        missing_captions: ``error``, ``skip`` or ``empty``.
        broken_images: ``error`` or ``skip``, for files that cannot be used.
        check: What is read of every file before training: ``header``, ``decode`` (all of it) or
            ``none``; None: ``decode`` if broken images are skipped, so that they are counted, else
            ``header``. A file that only decoding shows to be broken stops training, or with
            ``skip`` the next good one stands in for it, the same on every rank.
        num_workers: Loader processes per device.
        drop_last: Drop a short last training batch (of each class) instead of training on it.
        buckets: More shape classes for training beside the square: (height, width) by name. An
            image is of the class whose aspect ratio is nearest; validation keeps to the square.
    """

    batch_size: int = 8
    size: int = 512
    num_validation: int = 16
    missing_captions: Missing | str = Missing.ERROR
    broken_images: Broken | str = Broken.ERROR
    check: Check | str | None = None
    num_workers: int = 2
    drop_last: bool = False
    buckets: Mapping[str, Sequence[int]] | None = None

    @property
    def policy(self) -> Policy:
        """What becomes of faults."""
        return Policy(missing=Missing(self.missing_captions), broken=Broken(self.broken_images))

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        """(height, width) by shape class, the square first."""
        more = {name: (high, wide) for name, (high, wide) in (self.buckets or {}).items()}
        return {BASE: (self.size, self.size)} | more

    @property
    def depth(self) -> Check:
        """How much is read before training."""
        if self.check is None:
            return Check.DECODE if self.policy.broken is Broken.SKIP else Check.HEADER
        return Check(self.check)


class StoredDataModule(L.LightningDataModule, ABC):
    """Samples on disk; a subclass says what there is, and what they are trained with."""

    decoder = IMAGE

    def __init__(self, options: StoredOptions) -> None:
        super().__init__()
        self.options = options
        self.batch_size = options.batch_size
        self._splits: tuple[StoredDataset, StoredDataset] | None = None

    @abstractmethod
    def list_part(self, part: str) -> Listing:
        """List the samples of `ALL`, `TRAIN` or `VALIDATION`.

        Raises:
            DataError: It cannot be listed at all.
        """

    @abstractmethod
    def is_split(self) -> bool:
        """Whether the set is split on disk."""

    @abstractmethod
    def conditions(self, samples: Sequence[Sample], *, training: bool) -> Conditions:
        """What these samples are trained with.

        Raises:
            DataError: They cannot be used.
        """

    def check_conditions(self, samples: Sequence[Sample], *, training: bool) -> None:
        """What `conditions` would refuse of the samples themselves, in no time.

        Raises:
            DataError: They cannot be used.
        """

    def parts(self) -> tuple[str, ...]:
        """What there is to list."""
        return (TRAIN, VALIDATION) if self.is_split() else (ALL,)

    def take(
        self, part: str, *, depth: Check | None = None, progress: Progress | None = None
    ) -> Inventory:
        """Look at all files of a part; `depth` instead of the options'.

        Raises:
            DataError: It cannot be listed at all.
        """
        look = Look(
            probe=self.decoder.probe,
            sides=self._sides(training=part != VALIDATION),
            check=self.options.depth if depth is None else depth,
            policy=self.options.policy,
        )
        return take_inventory(self.list_part(part), look, progress)

    def split(self, parts: Mapping[str, Inventory]) -> tuple[Inventory, Inventory]:
        """Training and validation samples of the parts' usable ones.

        Raises:
            DataError: Training refuses a fault, or there are too few samples.
        """
        for inventory in parts.values():
            settled(inventory.faults)
            if not inventory.samples:
                raise DataError(
                    f"{inventory.where} names no usable sample; expected at least one (`dpipe "
                    "doctor` lists what is wrong)"
                )
        if ALL not in parts:
            return parts[TRAIN], parts[VALIDATION]
        whole, held_out = parts[ALL], self.options.num_validation
        count = len(whole.samples)
        if not 1 <= held_out < count:
            raise DataError(
                f"num_validation={held_out} of {count} images in {whole.where}; "
                "hold out at least 1 and keep at least 1 to train on"
            )
        held = {i * count // held_out for i in range(held_out)}
        return (
            whole.part(i for i in range(count) if i not in held),
            whole.part(i for i in range(count) if i in held),
        )

    def tally(self, train: Inventory, *, num_replicas: int) -> tuple[BucketTally, ...]:
        """What an epoch makes of the training samples, by shape class.

        Raises:
            DataError: They do not fill one global batch, and `drop_last` is on.
        """
        counts = {name: 0 for name in self.options.sides}
        for name in train.buckets:
            counts[name] += 1
        found = tally_buckets(
            counts,
            batch_size=self.batch_size,
            num_replicas=num_replicas,
            drop_last=self.options.drop_last,
        )
        if not any(t.num_batches for t in found):
            raise DataError(
                too_few(len(train.samples), self.batch_size, num_replicas)
                + "; with drop_last=true nothing is trained on: add images, use smaller batches "
                "or fewer devices, or drop_last=false"
            )
        return found

    def setup(self, stage: str | None = None) -> None:
        """Decide which samples are trained on, and read their captions, once.

        Raises:
            DataError: Training refuses a fault (`dpipe doctor` lists all of them), there are too
                few samples, or they cannot be conditioned on.
        """
        if self._splits is None:
            ranks = self.trainer.world_size if self.trainer is not None else 1
            train, validation = self._on_rank_zero(self._decide)
            self.tally(train, num_replicas=ranks)
            log.info(
                "%d images to train on, %d held out", len(train.samples), len(validation.samples)
            )
            if len(train.samples) < self.batch_size * ranks:
                log.warning("%s", too_few(len(train.samples), self.batch_size, ranks))
            self._splits = self._dataset(train, True), self._dataset(validation, False)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled, batches of one shape class; Lightning puts in the distributed sampler."""
        images, workers = self.dataset(0), self.options.num_workers
        # Lightning stops shuffling for this flag, but not inside a batch sampler.
        trainer: Any = self.trainer
        overfit = trainer is not None and trainer.overfit_batches > 0
        sampler = BucketBatchSampler(
            images.buckets,
            self.batch_size,
            drop_last=self.options.drop_last,
            shuffle=not overfit,
            seed=seed(),
            with_epoch=not overfit,
        )
        return ResumableLoader(
            images, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The held-out samples, in order."""
        return DataLoader(
            self.dataset(1), batch_size=self.batch_size, num_workers=self.options.num_workers
        )

    def dataset(self, index: int) -> "StoredDataset":
        """Training (0) or validation samples (1); `setup` runs first."""
        assert self._splits is not None, "setup() runs first"
        return self._splits[index]

    def _sides(self, *, training: bool) -> dict[str, tuple[int, int]]:
        sides = self.options.sides
        return sides if training else {BASE: sides[BASE]}

    def _decide(self) -> tuple[Inventory, Inventory]:
        parts = {}
        for part in self.parts():
            told = Told(f"looking at {part}", tell=log.info)
            parts[part] = inventory = self.take(part, progress=told)
            if counts := left_out(inventory.faults):
                log.warning(
                    "left out of %s: %s (`dpipe doctor` lists them)", inventory.where, counts
                )
        return self.split(parts)

    def _on_rank_zero(self, work: Callable[[], Any]) -> Any:
        """What rank 0 makes of the files, on every rank; its refusal is every rank's."""
        trainer = self.trainer
        if trainer is None or trainer.world_size == 1:
            return work()
        outcome: Any = None
        if trainer.is_global_zero:
            try:
                outcome = work()
            except DataError as error:
                outcome = DataError(str(error))
        outcome = trainer.strategy.broadcast(outcome)
        if isinstance(outcome, DataError):
            raise outcome if trainer.is_global_zero else DataError(f"rank 0: {outcome}")
        return outcome

    def _dataset(self, inventory: Inventory, training: bool) -> "StoredDataset":
        square = (BASE,) * len(inventory.samples)
        return StoredDataset(
            samples=inventory.samples,
            buckets=inventory.buckets if training else square,
            sides=self.options.sides,
            conditions=self.conditions(inventory.samples, training=training),
            decoder=self.decoder,
            broken=self.options.policy.broken,
        )


class StoredDataset(Dataset[dict[str, Tensor]]):
    """Decodes samples. Sample i in epoch e has the number ``e * len(self) + i``."""

    def __init__(
        self,
        *,
        samples: Sequence[Sample],
        buckets: Sequence[str],
        sides: Mapping[str, tuple[int, int]],
        conditions: Conditions,
        decoder: Decoder,
        broken: Broken,
    ) -> None:
        self.samples = samples
        self.buckets = buckets
        self._sides = sides
        self._conditions = conditions
        self._decoder = decoder
        self._broken = broken
        self._named: set[int] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        epoch, index = divmod(number, len(self))
        for step in range(len(self)):
            at = (index + step) % len(self)
            try:
                return self._decoded(at, epoch, self._sides[self.buckets[index]])
            except DataError as error:
                if self._broken is Broken.ERROR:
                    raise
                if at not in self._named:
                    self._named.add(at)
                    log.warning("%s; the next image stands in for it", error)
        raise DataError(f"none of {len(self)} images can be decoded; the log names each of them")

    def _decoded(self, index: int, epoch: int, sides: tuple[int, int]) -> dict[str, Tensor]:
        sample = self.samples[index]
        fields = {self._decoder.field: self._decoder.decode(sample.path, sides)}
        if sample.hint is not None:
            fields["hint"] = (decode_image(sample.hint, sides) + 1) / 2
        return fields | self._conditions.fields(index, epoch)


def too_few(count: int, batch_size: int, num_replicas: int) -> str:
    """The arithmetic of a set that is smaller than one global batch."""
    return (
        f"{count} samples to train on, fewer than one global batch of "
        f"{batch_size} x {num_replicas} ranks = {batch_size * num_replicas}"
    )


def seed() -> int:
    """The seed of `seed_everything`, as Lightning's own distributed sampler takes it."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))

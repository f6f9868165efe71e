"""Batches of one shape class each: aspect-ratio buckets, the same class on all ranks in a step.

In:     the class of every sample.
Out:    this rank's batches of indices, deterministic by (seed, epoch), equally many on all ranks.

Every global batch of ``batch_size * num_replicas`` samples is of one class; rank r takes samples
r, r + num_replicas, ... of it. What is left over of a class makes one shorter batch (padded with
repeated samples to a multiple of the ranks, as DistributedSampler pads) or, with `drop_last`, none.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.images import probe_image
from lightning_dpipe.data.samples import Stored

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTally:
    """One class's samples and what an epoch makes of them, over all ranks.

    ``num_samples + num_repeated - num_dropped`` samples are trained on in `num_batches` global
    batches.
    """

    name: str
    num_samples: int
    num_batches: int
    num_dropped: int
    num_repeated: int


def tally_buckets(
    counts: Mapping[str, int], *, batch_size: int, num_replicas: int, drop_last: bool
) -> tuple[BucketTally, ...]:
    """What an epoch makes of each class' samples; `counts` are samples by class.

    `batch_size` is per rank; a global batch has ``batch_size * num_replicas`` samples.
    """
    whole = batch_size * num_replicas
    found = []
    for name, count in counts.items():
        used = count // whole * whole if drop_last else -(-count // num_replicas) * num_replicas
        found.append(
            BucketTally(
                name=name,
                num_samples=count,
                num_batches=-(-used // whole),
                num_dropped=max(0, count - used),
                num_repeated=max(0, used - count),
            )
        )
    return tuple(found)


class BucketBatchSampler(BatchSampler):
    """Batch sampler for a ``DataLoader`` whose samples have several shapes.

    Make it inside a ``train_dataloader`` hook: Lightning then puts its distributed sampler in as
    `sampler`, from which ranks and epoch are taken (not the order of samples).

    Args:
        buckets: Class of each sample of the dataset.
        batch_size: Samples per rank and step.
        sampler: Says ``num_replicas``, ``rank`` and ``epoch``; by default one process.
        drop_last: Drop what does not fill a global batch of its class.
        shuffle: New order of samples and batches every epoch; False: by class, in order.
        seed: Of the shuffling.
        with_epoch: Yield ``epoch * len(buckets) + index``, for a dataset whose samples differ from
            epoch to epoch: it gets the number by `divmod`, in whatever process it is.

    Raises:
        DataError: There are no samples, or no full batch of any class with `drop_last`.
    """

    def __init__(
        self,
        buckets: Sequence[str],
        batch_size: int,
        *,
        sampler: Sampler[int] | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        with_epoch: bool = False,
    ) -> None:
        if isinstance(buckets, Sampler):
            raise DataError(
                "a BucketBatchSampler was made outside a dataloader hook, so that Lightning cannot "
                "put its distributed sampler in; make it inside train_dataloader(), or pass "
                "sampler=DistributedSampler(...) and Trainer(use_distributed_sampler=False)"
            )
        if not len(buckets) or batch_size < 1:
            raise DataError(
                f"{len(buckets)} samples in batches of {batch_size}; both must be at least 1"
            )
        places: Any = range(len(buckets))
        alone: Sampler[int] = DistributedSampler(places, num_replicas=1, rank=0)
        super().__init__(alone if sampler is None else sampler, batch_size, drop_last)
        self.buckets, self.shuffle, self.seed = buckets, shuffle, seed
        names = list(dict.fromkeys(buckets))
        index = {name: k for k, name in enumerate(names)}
        of_sample = np.array([index[b] for b in buckets])
        self._members = {name: np.flatnonzero(of_sample == k) for name, k in index.items()}
        self._resumed: tuple[int, int] | None = None
        self._shift = 0
        self._told = False
        self._with_epoch = with_epoch
        if not len(self):
            raise DataError(
                f"no class has the {batch_size * self.num_replicas} samples of one global batch "
                f"({', '.join(f'{n} {len(m)}' for n, m in self._members.items())}); use smaller "
                "batches, or drop_last=False"
            )

    @property
    def num_replicas(self) -> int:
        """Ranks that share the data."""
        return int(getattr(self.sampler, "num_replicas", 1))

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return int(getattr(self.sampler, "rank", 0))

    @property
    def epoch(self) -> int:
        """The epoch that keys the order."""
        return int(getattr(self.sampler, "epoch", 0))

    def set_epoch(self, epoch: int) -> None:
        """Key the order of the following epoch."""
        sampler: Any = self.sampler
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)

    def upcoming(self) -> tuple[int, int]:
        """Epoch whose order the next iteration takes, and batches that it leaves out of it."""
        return (self.epoch + self._shift, 0) if self._resumed is None else self._resumed

    def resume(self, epoch: int, num_batches: int) -> None:
        """Continue after `num_batches` of `epoch`, and count later epochs from there.

        Lightning counts an epoch that ended early as a whole one; its number alone would leave the
        rest of it out.
        """
        self._resumed = (epoch, num_batches)

    def tally(self) -> tuple[BucketTally, ...]:
        """What becomes of each class's samples in one epoch."""
        return tally_buckets(
            {name: len(members) for name, members in self._members.items()},
            batch_size=self.batch_size,
            num_replicas=self.num_replicas,
            drop_last=self.drop_last,
        )

    def __len__(self) -> int:
        return sum(t.num_batches for t in self.tally())

    def __iter__(self) -> Iterator[list[int]]:
        self._tell()
        whole = self.batch_size * self.num_replicas
        epoch, skipped = self.upcoming()
        self._shift, self._resumed = epoch - self.epoch, None
        first = epoch * len(self.buckets) if self._with_epoch else 0
        batches: list[npt.NDArray[np.int64]] = []
        for place, (tally, members) in enumerate(
            zip(self.tally(), self._members.values(), strict=True)
        ):
            order = self._shuffled(members, place, epoch)
            order = np.resize(order, len(order) - tally.num_dropped + tally.num_repeated)
            batches += [order[at : at + whole] for at in range(0, len(order), whole)]
        for at in self._shuffled(np.arange(len(batches)), len(self._members), epoch)[skipped:]:
            yield (batches[at][self.rank :: self.num_replicas] + first).tolist()

    def _shuffled(
        self, items: npt.NDArray[np.int64], place: int, epoch: int
    ) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return items
        key = np.random.SeedSequence([self.seed, epoch, place])
        return np.random.Generator(np.random.Philox(key)).permutation(items)

    def _tell(self) -> None:
        if self._told or self.rank != 0:
            return
        self._told = True
        size = f"{self.batch_size} x {self.num_replicas} ranks"
        for t in self.tally():
            log.info(
                "shape class %s: %d samples, %d global batches of %s, %d dropped, %d repeated",
                t.name, t.num_samples, t.num_batches, size, t.num_dropped, t.num_repeated,
            )  # fmt: skip


def nearest_bucket(height: int, width: int, sides: Mapping[str, tuple[int, int]]) -> str:
    """The class whose aspect ratio is nearest an image's; of equals the first.

    `sides` are (height, width) by class name; ratios are compared by their logarithm, so that wide
    and tall images are treated alike.

    Raises:
        DataError: A side is not positive, or there is no class.
    """
    for name, (high, wide) in {"the image": (height, width), **sides}.items():
        if high < 1 or wide < 1:
            raise DataError(f"{name} is {high} x {wide} pixels; both sides must be at least 1")
    if not sides:
        raise DataError("no shape class to choose from; give at least one")
    aspect = math.log(width / height)
    return min(sides, key=lambda name: abs(math.log(sides[name][1] / sides[name][0]) - aspect))


def image_bucket(path: Stored, sides: Mapping[str, tuple[int, int]]) -> str:
    """Class of an image file, as it is after its EXIF rotation; only the header is read.

    Raises:
        DataError: The file cannot be opened.
    """
    found = probe_image(path, decode=False)
    return nearest_bucket(found.height, found.width, sides)

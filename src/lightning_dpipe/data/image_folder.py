"""Your own captioned images, decoded when they are read.

In:     a folder as `captions` reads it; or one with ``train/`` and ``validation/`` of that kind.
Out:    batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, input_ids and
        attention_mask int64 ``[batch, num_tokens]`` (input_ids_2, ... for more tokenizers), and, if
        asked for, hint float32 ``[batch, 3, size, size]`` in ``[0, 1]``.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.buckets import BucketBatchSampler, image_bucket
from lightning_dpipe.data.captions import CaptionedImage, Columns, Missing, read_captions
from lightning_dpipe.data.images import decode_image
from lightning_dpipe.models.parts import Source, caption_fields

log = logging.getLogger(__name__)


class Broken(str, Enum):
    """What becomes of an image that cannot be decoded."""

    ERROR = "error"
    SKIP = "skip"


class ImageFolderDataModule(L.LightningDataModule):
    """Captioned images for Stable Diffusion, and with a hint column for ControlNet.

    Args:
        folder: Holds images and captions, or ``train/`` and ``validation/``.
        tokenizer: Folder or hub id of a diffusers pipeline, for its tokenizers.
        batch_size: Samples per device and step.
        size: Side of the images in pixels: the centre square, resized.
        num_tokens: Length captions are padded or cut to; a list is one length per tokenizer.
        num_validation: Images held out, evenly over the files, when there is no ``validation/``.
        file_column: Key of the image's path in the index.
        caption_column: Key of its caption.
        hint_column: Key of its hint's path; None reads no hints.
        missing_captions: ``error``, ``skip`` or ``empty``.
        broken_images: ``error``, or ``skip``: the next good image stands in, the same on every
            rank, and each broken file is named once in the log.
        num_workers: Loader processes per device.
        drop_last: Drop a short last training batch (of each class) instead of training on it.
        buckets: More shape classes for training beside the square: (height, width) by name. An
            image is of the class whose aspect ratio is nearest; validation keeps to the square.
    """

    def __init__(
        self,
        *,
        folder: str | Path,
        tokenizer: str,
        batch_size: int = 8,
        size: int = 512,
        num_tokens: int | Sequence[int] = 77,
        num_validation: int = 16,
        file_column: str = "file_name",
        caption_column: str = "text",
        hint_column: str | None = None,
        missing_captions: Missing | str = Missing.ERROR,
        broken_images: Broken | str = Broken.ERROR,
        num_workers: int = 2,
        drop_last: bool = False,
        buckets: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.source = Source(path=tokenizer)
        self.batch_size = batch_size
        self.size = size
        self.num_tokens = num_tokens
        self.num_validation = num_validation
        self.columns = Columns(file=file_column, caption=caption_column, hint=hint_column)
        self.missing = Missing(missing_captions)
        self.broken = Broken(broken_images)
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.sides = {BASE: (size, size)}
        self.sides |= {name: (high, wide) for name, (high, wide) in (buckets or {}).items()}
        self._splits: tuple[_Images, _Images] | None = None

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """Captions of the validation images, in order."""
        return tuple(image.caption for image in self._split(1).images)

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenize the captions, once; images are decoded later.

        Raises:
            DataError: The folder has no usable captions, or too few images.
            SpecError: The tokenizer cannot be loaded.
        """
        if self._splits is None:
            train, validation = self._read()
            log.info("%d images to train on, %d held out", len(train), len(validation))
            self._splits = (
                self._dataset(train, [self._bucket(image) for image in train]),
                self._dataset(validation, [BASE] * len(validation)),
            )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled; Lightning puts in the distributed sampler."""
        images, workers = self._split(0), self.num_workers
        if len(self.sides) > 1:
            sampler = BucketBatchSampler(
                images.buckets, self.batch_size, drop_last=self.drop_last, seed=_seed()
            )
            return DataLoader(
                images,
                batch_sampler=sampler,
                num_workers=workers,
                persistent_workers=workers > 0,
            )
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=True,
            num_workers=workers,
            drop_last=self.drop_last,
            persistent_workers=workers > 0,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The held-out images, in file order."""
        return DataLoader(self._split(1), batch_size=self.batch_size, num_workers=self.num_workers)

    def _split(self, index: int) -> "_Images":
        assert self._splits is not None, "setup() runs first"
        return self._splits[index]

    def _read(self) -> tuple[Sequence[CaptionedImage], Sequence[CaptionedImage]]:
        if (self.folder / "train").is_dir() and (self.folder / "validation").is_dir():
            return self._captions("train"), self._captions("validation")
        images = self._captions(".")
        if not 1 <= self.num_validation < len(images):
            raise DataError(
                f"num_validation={self.num_validation} of {len(images)} images in {self.folder}; "
                "hold out at least 1 and keep at least 1 to train on"
            )
        held = {i * len(images) // self.num_validation for i in range(self.num_validation)}
        return (
            [image for i, image in enumerate(images) if i not in held],
            [image for i, image in enumerate(images) if i in held],
        )

    def _captions(self, name: str) -> Sequence[CaptionedImage]:
        return read_captions(self.folder / name, columns=self.columns, missing=self.missing)

    def _bucket(self, image: CaptionedImage) -> str:
        """Class of an image; one that cannot be opened is met again when it is decoded."""
        if len(self.sides) == 1:
            return BASE
        try:
            return image_bucket(image.path, self.sides)
        except DataError:
            if self.broken is Broken.ERROR:
                raise
            return BASE

    def _dataset(self, images: Sequence[CaptionedImage], buckets: Sequence[str]) -> "_Images":
        tokens = caption_fields(self.source, [i.caption for i in images], self.num_tokens)
        return _Images(images, tokens, buckets, self.sides, self.broken)


def _seed() -> int:
    """The seed of `seed_everything`, as Lightning's own distributed sampler takes it."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class _Images(Dataset[dict[str, Tensor]]):
    def __init__(
        self,
        images: Sequence[CaptionedImage],
        tokens: Mapping[str, Tensor],
        buckets: Sequence[str],
        sides: Mapping[str, tuple[int, int]],
        broken: Broken,
    ) -> None:
        self.images = images
        self.buckets = buckets
        self._tokens = tokens
        self._sides = sides
        self._broken = broken
        self._named: set[int] = set()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        for step in range(len(self)):
            at = (index + step) % len(self)
            try:
                return self._decoded(at, self._sides[self.buckets[index]])
            except DataError as error:
                if self._broken is Broken.ERROR:
                    raise
                if at not in self._named:
                    self._named.add(at)
                    log.warning("%s; the next image stands in for it", error)
        raise DataError(f"none of {len(self)} images can be decoded; the log names each of them")

    def _decoded(self, index: int, sides: tuple[int, int]) -> dict[str, Tensor]:
        image = self.images[index]
        sample = {
            "image": decode_image(image.path, sides),
            **{name: ids[index] for name, ids in self._tokens.items()},
        }
        if image.hint is not None:
            sample["hint"] = (decode_image(image.hint, sides) + 1) / 2
        return sample

"""The emoji set: 376 captioned pictures to train on, 24 held-out captions; shipped in the package.

In:     a folder with ``train/`` and ``validation/`` in imagefolder layout (the shipped one).
Out:    batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, and input_ids and
        attention_mask int64 ``[batch, max_tokens]``.
"""

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpipe.data.captions import read_captions
from lightning_dpipe.data.fields import FieldDataset
from lightning_dpipe.data.images import decode_image
from lightning_dpipe.data.minilm import tokenize
from lightning_dpipe.data.samples import Sample

EMOJI_FOLDER = Path(__file__).parent / "emoji"


class EmojiDataModule(L.LightningDataModule):
    """Captioned images that fit in memory, decoded and tokenized once in `setup`.

    Args:
        batch_size: Samples per device and step.
        size: Side of the images in pixels.
        max_tokens: Length captions are padded to; a longer caption is refused.
        repeat: Times each training image occurs in one epoch; see `FieldDataset`.
        num_workers: Loader processes; the data is in memory, so 0 is fastest.
        drop_last: Drop a short last training batch instead of training on it.
        folder: Holds ``train/`` and ``validation/``; the shipped emoji set if None.
    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        size: int = 32,
        max_tokens: int = 16,
        repeat: int = 1,
        num_workers: int = 0,
        drop_last: bool = False,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.size = size
        self.max_tokens = max_tokens
        self.repeat = repeat
        self.num_workers = num_workers
        self.drop_last = drop_last
        self.folder = EMOJI_FOLDER if folder is None else Path(folder)
        self._train: FieldDataset | None = None
        self._validation: FieldDataset | None = None

    @property
    def train_images(self) -> tuple[Sample, ...]:
        """The training files and captions, in file order."""
        return read_captions(self.folder / "train")

    @property
    def validation_images(self) -> tuple[Sample, ...]:
        """The held-out files and captions, in file order."""
        return read_captions(self.folder / "validation")

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """The held-out captions, in file order."""
        return tuple(image.caption for image in self.validation_images)

    def tokenized(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Token fields of any captions, to draw them.

        Raises:
            DataError: A caption is too long, or MiniLM's package is not installed.
        """
        return tokenize(captions, max_tokens=self.max_tokens)

    def setup(self, stage: str | None = None) -> None:
        """Decode and tokenize both splits, once.

        Raises:
            DataError: A file or caption is unusable, or MiniLM's package is not installed.
        """
        if self._train is None:
            self._train = self._load(self.train_images, repeat=self.repeat)
            self._validation = self._load(self.validation_images, repeat=1)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled; Lightning puts in the distributed sampler."""
        assert self._train is not None, "setup() runs first"
        return DataLoader(
            self._train,
            batch_size=self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            drop_last=self.drop_last,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The held-out captions, in file order."""
        assert self._validation is not None, "setup() runs first"
        return DataLoader(
            self._validation, batch_size=self.batch_size, num_workers=self.num_workers
        )

    def _load(self, images: tuple[Sample, ...], *, repeat: int) -> FieldDataset:
        tokens = tokenize([image.caption for image in images], max_tokens=self.max_tokens)
        pixels = torch.stack([decode_image(image.path, self.size) for image in images])
        return FieldDataset({"image": pixels, **tokens}, repeat=repeat)

"""Handwritten digits: scikit-learn's 1,797 real 8x8 scans with labels.

In:     nothing; the set comes with scikit-learn.
Out:    batches of image float32 ``[batch, 1, 8, 8]`` in ``[-1, 1]`` and label int64 ``[batch]``.
Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

from importlib.util import find_spec

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.fields import FieldDataset

NUM_CLASSES = 10
NUM_HELD_OUT = 297


class DigitsDataModule(L.LightningDataModule):
    """1,500 digits to train on; the last 297 of the file are held out.

    Args:
        batch_size: Samples per device and step.
        repeat: Times each training image occurs in one epoch; see `FieldDataset`.
        num_workers: Loader processes; the data is in memory, so 0 is fastest.
        drop_last: Drop a short last training batch instead of training on it.
    """

    def __init__(
        self,
        *,
        batch_size: int = 64,
        repeat: int = 1,
        num_workers: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.repeat = repeat
        self.num_workers = num_workers
        self.drop_last = drop_last
        self._train: FieldDataset | None = None
        self._validation: FieldDataset | None = None

    def setup(self, stage: str | None = None) -> None:
        """Load both splits, once.

        Raises:
            DataError: scikit-learn is not installed.
        """
        if self._train is None:
            image, label = _load()
            train, held_out = slice(None, -NUM_HELD_OUT), slice(-NUM_HELD_OUT, None)
            self._train = FieldDataset(
                {"image": image[train], "label": label[train]}, repeat=self.repeat
            )
            self._validation = FieldDataset({"image": image[held_out], "label": label[held_out]})

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
        """The held-out digits, in file order."""
        assert self._validation is not None, "setup() runs first"
        return DataLoader(
            self._validation, batch_size=self.batch_size, num_workers=self.num_workers
        )


def _load() -> tuple[Tensor, Tensor]:
    if find_spec("sklearn") is None:
        raise DataError(
            "the digits come with scikit-learn, which is not installed; "
            "install it with: pip install 'lightning-dpipe[digits]'"
        )
    from sklearn.datasets import load_digits  # an extra, and slow to import

    digits = load_digits()
    image = torch.from_numpy(digits.images).float().div_(8.0).sub_(1.0).unsqueeze_(1)
    return image, torch.from_numpy(digits.target).long()

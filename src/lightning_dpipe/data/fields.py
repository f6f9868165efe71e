"""Datasets of tensors held in memory, with a virtual length.

In:     tensors by field name, each ``[num_samples, ...]``.
Out:    samples as dicts of tensors; the default collate stacks them into a batch.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.utils.data import Dataset

from lightning_dpipe.core.errors import DataError


class FieldDataset(Dataset[dict[str, Tensor]]):
    """Samples of equal standing under each field name, seen `repeat` times an epoch.

    Args:
        fields: Tensors ``[num_samples, ...]`` by name.
        repeat: Times each sample occurs in one epoch. A small set ends its epochs every few steps,
            and each end costs a reload and a step without lookahead; ``repeat=10`` is the same
            training with a tenth of the epochs.

    Raises:
        DataError: The tensors differ in length, there is none, or `repeat` is below 1.
    """

    def __init__(self, fields: Mapping[str, Tensor], *, repeat: int = 1) -> None:
        lengths = {name: len(values) for name, values in fields.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise DataError(f"fields have lengths {lengths}; expected one length, at least 1")
        if repeat < 1:
            raise DataError(f"repeat is {repeat}; expected at least 1")
        self.fields = dict(fields)
        self.num_samples = next(iter(lengths.values()))
        self.repeat = repeat

    def __len__(self) -> int:
        return self.num_samples * self.repeat

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: values[index % self.num_samples] for name, values in self.fields.items()}

import pytest
import torch

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.fields import FieldDataset


def test_each_sample_occurs_repeat_times_and_its_fields_stay_together() -> None:
    dataset = FieldDataset({"a": torch.arange(3), "b": torch.arange(3) * 10}, repeat=4)
    samples = [dataset[i] for i in range(len(dataset))]
    assert sorted(int(s["a"]) for s in samples) == sorted(4 * [0, 1, 2])
    assert all(s["b"] == 10 * s["a"] for s in samples)


def test_iterating_ends() -> None:
    assert len(list(FieldDataset({"a": torch.arange(3)}, repeat=2))) == 6  # type: ignore[arg-type]


def test_unequal_empty_and_unrepeated_fields_are_refused() -> None:
    with pytest.raises(DataError, match=r"lengths \{'a': 3, 'b': 2\}"):
        FieldDataset({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(DataError, match="at least 1"):
        FieldDataset({"a": torch.zeros(0)})
    with pytest.raises(DataError, match="at least 1"):
        FieldDataset({})
    with pytest.raises(DataError, match="repeat is 0"):
        FieldDataset({"a": torch.zeros(3)}, repeat=0)

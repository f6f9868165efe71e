import pytest
import torch
from sklearn.datasets import load_digits

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data import digits
from lightning_dpipe.data.digits import DigitsDataModule


def test_batches_hold_the_scans_and_their_labels() -> None:
    module = DigitsDataModule(batch_size=100)
    module.setup()
    train = list(module.train_dataloader())
    held_out = list(module.val_dataloader())
    assert sum(len(batch["label"]) for batch in train) == 1500
    assert len(held_out[-1]["label"]) == 97
    real = load_digits()
    image = torch.cat([batch["image"] for batch in held_out])
    assert image.shape == (297, 1, 8, 8)
    assert image.dtype is torch.float32
    expected = torch.from_numpy(real.images[-297:]).float() / 8 - 1
    assert torch.equal(image[:, 0], expected)
    label = torch.cat([batch["label"] for batch in held_out])
    assert label.tolist() == real.target[-297:].tolist()


def test_a_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'lightning-dpipe\[digits\]'"):
        DigitsDataModule().setup()

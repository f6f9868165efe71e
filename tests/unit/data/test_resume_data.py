"""A run that is stopped and resumed reads the samples of one that is not."""

import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import Tensor, nn

from lightning_dpipe.data.class_data import ClassFoldersDataModule

NUM_IMAGES = 9  # one is held out


class Reader(L.LightningModule):
    """Notes what it reads; its weight depends on the order of everything that it read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.read: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        grey = batch["image"][:, 0, 0, 0]
        self.read.append(((grey + 1) * 127.5 / 10).round().int().tolist())
        return (self.weight * grey - batch["label"]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def images(folder: Path) -> None:
    for i in range(NUM_IMAGES):
        path = folder / "set" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (10 * i, 10 * i, 10 * i)).save(path)


def fit(
    folder: Path,
    epochs: int | None,
    name: str,
    ckpt: Path | None,
    changes: dict[str, Any] | None = None,
    **flags: Any,
) -> Reader:
    options: dict[str, Any] = {"size": 4, "num_workers": 0, "num_validation": 1, "batch_size": 1}
    data = ClassFoldersDataModule(path=folder / "set", **{**options, **(changes or {})})
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1 if epochs is None else epochs,
        accumulate_grad_batches=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        limit_val_batches=0, **{"enable_checkpointing": False, **flags},
    )  # fmt: skip
    module = Reader()
    trainer.fit(module, data, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    if epochs is not None:
        assert trainer.global_step == epochs * math.ceil(trainer.num_training_batches / 4)
    return module


def test_resumed_twice_under_accumulation_is_the_run_in_one_piece(tmp_path: Path) -> None:
    images(tmp_path)
    whole = fit(tmp_path, 5, "whole", None)
    pieces, ckpt = [], None
    for epochs in (1, 2, 5):
        pieces.append(fit(tmp_path, epochs, f"to{epochs}", ckpt))
        ckpt = tmp_path / f"to{epochs}.ckpt"
    read = [batch for piece in pieces for batch in piece.read]
    assert read == whole.read
    assert len(read) == 5 * (NUM_IMAGES - 1)
    orders = [tuple(b[0] for b in read[at : at + 8]) for at in range(0, 40, 8)]
    assert len(set(orders)) == 5
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert torch.equal(pieces[-1].weight, whole.weight)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resumed_from_any_step_twice_it_reads_what_is_left(
    tmp_path: Path, num_workers: int
) -> None:
    """Two steps of four batches make an epoch: every other step is the last one of its epoch."""
    images(tmp_path)

    def run(name: str, ckpt: Path | None) -> Reader:
        keep = ModelCheckpoint(
            dirpath=tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1,
            save_on_train_epoch_end=False,
        )  # fmt: skip
        flags: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "max_steps": 7}
        return fit(tmp_path, None, name, ckpt, {"num_workers": num_workers}, **flags)

    whole = run("whole", None)
    assert len(whole.read) == 28
    for step in (1, 2, 3, 4):
        once = run(f"{step}", tmp_path / "whole" / f"step={step}.ckpt")
        twice = run(f"{step}+1", tmp_path / f"{step}" / f"step={step + 1}.ckpt")
        assert once.read == whole.read[4 * step :]
        assert twice.read == whole.read[4 * step + 4 :]
        assert torch.equal(once.weight, whole.weight)
        assert torch.equal(twice.weight, whole.weight)


def test_a_file_written_after_a_run_that_stopped_within_an_epoch_continues_it(
    tmp_path: Path,
) -> None:
    """Lightning counts that epoch as a whole one, and would read the rest of the next."""
    images(tmp_path)
    whole = fit(tmp_path, None, "whole", None, max_steps=7)
    first = fit(tmp_path, None, "first", None, max_steps=3)
    rest = fit(tmp_path, None, "rest", tmp_path / "first.ckpt", max_steps=7)
    assert first.read + rest.read == whole.read
    assert torch.equal(rest.weight, whole.weight)


def test_resumed_with_other_batches_the_epoch_starts_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images(tmp_path)
    fit(tmp_path, None, "mid", None, max_steps=1)
    with caplog.at_level(logging.WARNING):
        other = fit(tmp_path, None, "x", tmp_path / "mid.ckpt", {"batch_size": 2}, max_steps=2)
    assert "the epoch starts anew" in caplog.text
    assert "'batch_size': 1" in caplog.text
    assert "'batch_size': 2" in caplog.text
    assert all(len(batch) == 2 for batch in other.read)


def test_overfit_batches_takes_the_same_batches_every_epoch(tmp_path: Path) -> None:
    images(tmp_path)
    read = fit(tmp_path, 3, "overfit", None, overfit_batches=3).read
    assert read == [[2], [4], [6]] * 3  # class a, without the one that is held out

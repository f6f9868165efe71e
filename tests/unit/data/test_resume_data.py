"""A run that is stopped and resumed reads the samples of one that is not.

Checkpoints lie after the last batch of an epoch. Within an epoch Lightning continues a loader only
if that can save its state.
"""

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
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


def fit(folder: Path, epochs: int, name: str, ckpt: Path | None, **flags: Any) -> Reader:
    data = ClassFoldersDataModule(
        path=folder / "set", size=4, num_workers=0, num_validation=1, batch_size=1
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, accumulate_grad_batches=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder, limit_val_batches=0, **flags,
    )  # fmt: skip
    module = Reader()
    trainer.fit(module, data, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
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


def test_overfit_batches_takes_the_same_batches_every_epoch(tmp_path: Path) -> None:
    images(tmp_path)
    read = fit(tmp_path, 3, "overfit", None, overfit_batches=3).read
    assert read == [[2], [4], [6]] * 3  # class a, without the one that is held out

"""A training script as users write it, run by `test_dist_cascade`: ``python cascade_job.py FOLDER``.

One launch of two ranks trains the cascade whole, in two halves, and without filled bubbles.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

import lightning_dpipe  # noqa: F401  (registers the strategy)
from cascade import Cascade, CascadeData
from lightning_dpipe.core.jsonio import save
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.callbacks.ema import EMA

FLAGS: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


class Record(Callback):
    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        for name in ("train/loss", "train/loss/base", "train/loss/fine"):
            self.rows.setdefault(name, []).append(float(trainer.callback_metrics[name]))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            for name in ("val/loss", "val/loss/base", "val/loss/fine"):
                self.rows.setdefault(name, []).append(float(trainer.callback_metrics[name]))


def train(
    name: str,
    folder: Path,
    *,
    strategy: Any = "diffusionpipe",
    devices: int = 2,
    epochs: int = 2,
    fill: bool = True,
    ckpt: Path | None = None,
) -> Trainer:
    record = Record()
    callbacks = [record, EMA(0.9), *([BubbleFill()] if fill else [])]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **FLAGS,
    )
    data = CascadeData(joint=1 if devices == 2 else 2)
    trainer.fit(Cascade(), data, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    if trainer.is_global_zero:
        (folder / f"{name}.json").write_text(json.dumps(record.rows))
    return trainer


def main(folder: Path) -> None:
    trainer = train("filled", folder)
    if trainer.is_global_zero:
        save(trainer.strategy.plan, folder / "plan.json")  # type: ignore[attr-defined]
    train("unfilled", folder, fill=False)
    train("half", folder, epochs=1)
    train("resumed", folder, ckpt=folder / "half.ckpt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))

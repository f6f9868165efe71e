"""A training script as users write it, run by the tests: ``python strategy_job.py NAME FOLDER``.

Each scenario is one launch of two ranks; results are JSON files and checkpoints in the folder.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_dpipe  # noqa: F401  (registers the strategy)
from lightning_dpipe.core.timeline import Activity, FrozenWork
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.callbacks.ema import EMA
from lightning_dpipe.strategy.callbacks.ledger import Ledger
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from toy import Toy, ToyData

STEPS_PER_EPOCH = 4
SIZES = {"count": 60, "batch_size": 8, "val": 16}  # 7.5 samples x 2 ranks x 4: a short last batch


class Record(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.indices: list[list[int]] = []
        self.val: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.indices.append(batch["index"].tolist())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.val.append(float(trainer.callback_metrics["val/loss"]))


class Encoded(Callback):
    """Which frozen work each step of this rank does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[list[str]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.installed.session.trace(True)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        records = trainer.strategy.installed.runner.last.trace.records
        frozen = [FrozenWork.parse(r.label) for r in records if r.activity is Activity.FROZEN]
        self.steps.append([work.component for work in frozen])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        path = self.folder / f"encoded.{trainer.global_rank}.json"
        path.write_text(json.dumps(self.steps))


def train(
    name: str,
    folder: Path,
    strategy: Any,
    *,
    epochs: int = 5,
    callbacks: tuple[Callback, ...] = (),
    ckpt: Path | None = None,
    module: Toy | None = None,
    **flags: Any,
) -> tuple[Trainer, Toy]:
    record = Record()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[record, *callbacks],
        **flags,
    )
    module = module or Toy(self_conditioning=True)
    trainer.fit(module, ToyData(**SIZES), ckpt_path=ckpt)
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    rows = {"losses": record.losses, "indices": record.indices, "val": record.val}
    (folder / f"{name}.{trainer.global_rank}.json").write_text(json.dumps(rows | metrics))
    return trainer, module


def parity(folder: Path) -> None:
    """The same module under ddp, as a pipeline, and with filled bubbles."""
    train("ddp", folder, "ddp")
    train("pipe", folder, "diffusionpipe")
    trainer, module = train("filled", folder, "diffusionpipe", callbacks=(BubbleFill(), Ledger()))
    keeps = BubbleFill(cache="disk", cache_dir=folder / "encodings")
    train("kept", folder, "diffusionpipe", callbacks=(keeps, Encoded(folder), EMA(0.9)))
    again = trainer.validate(module, ToyData(**SIZES), verbose=False)[0]["val/loss"]
    predicted = trainer.predict(module, ToyData(**SIZES))
    (folder / f"again.{trainer.global_rank}.json").write_text(
        json.dumps({"val": again, "predicted": [float(p) for p in predicted or ()]})
    )
    if trainer.global_rank:  # has more to do than the launching process
        time.sleep(2.0)
        (folder / "last").touch()


def window(folder: Path) -> None:
    """Clipping, accumulation, resume, replicas instead of stages."""
    flags: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3}
    train("ddp", folder, "ddp", **flags)
    train("pipe", folder, "diffusionpipe", callbacks=(BubbleFill(),), **flags)
    train("replicas", folder, DiffusionPipeStrategy(num_stages=1), **flags)
    train("half", folder, "diffusionpipe", epochs=2, **flags)
    train("resumed", folder, "diffusionpipe", ckpt=folder / "half.ckpt", **flags)
    train("one", folder, "diffusionpipe", epochs=1, **flags)


class Trap(torch.nn.Module):
    """A layer that fails, or kills its process, once it is armed."""

    def __init__(self, inner: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.armed = inner, how, False

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.armed and torch.is_grad_enabled():
            Path("sprung").touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the trap has sprung")
        return self.inner(*inputs)


class Arm(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for trap in module.modules():
            if isinstance(trap, Trap):
                trap.armed = trainer.global_step >= 3


class Trapped(Toy):
    def __init__(self, stage: str, how: str) -> None:
        super().__init__(self_conditioning=True)
        self.where, self.how = stage, how

    def configure_model(self) -> None:
        if self.blocks is None:
            super().configure_model()
            name = "entry" if self.where == "first" else "join"
            setattr(self, name, Trap(getattr(self, name), self.how))
            self.prepare_spec()


def fail(folder: Path, stage: str, how: str) -> None:
    strategy = DiffusionPipeStrategy(timeout=timedelta(seconds=120), cuts=(3,))
    train("fail", folder, strategy, epochs=50, callbacks=(Arm(),), module=Trapped(stage, how))


def stumble(folder: Path) -> None:
    """Rank 1 fails before it meets the others."""
    if os.environ.get("LOCAL_RANK") == "1":
        raise ImportError("no such thing")
    train("stumble", folder, "diffusionpipe")


def refuse(folder: Path) -> None:
    train("refused", folder, DiffusionPipeStrategy(num_stages=3))


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, where, *rest = sys.argv[1:]
    globals()[scenario](Path(where), *rest)

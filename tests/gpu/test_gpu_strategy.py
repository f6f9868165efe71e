"""The strategy on one GPU (nccl, a pipeline of one stage) against plain Lightning on it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.callbacks.ledger import Ledger
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from toy import Images, Toy, ToyData

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class Ordered(ToyData):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Images(self.count), batch_size=self.batch_size)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-5), ("bf16-mixed", 3e-2)])
def test_a_fit_on_a_gpu_equals_plain_lightning(
    tmp_path: Path, precision: Any, tolerance: float
) -> None:
    def fit(strategy: Any, callbacks: list[Any]) -> tuple[Trainer, Toy]:
        trainer = Trainer(
            strategy=strategy,
            accelerator="gpu",
            devices=1,
            max_epochs=2,
            precision=precision,
            gradient_clip_val=0.2,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=callbacks,
            default_root_dir=tmp_path,
        )
        module = Toy(self_conditioning=True)
        trainer.fit(module, Ordered(count=22, batch_size=8))
        return trainer, module

    plain, expected = fit("auto", [])
    piped, got = fit(DiffusionPipeStrategy(), [BubbleFill(), Ledger(every_n_steps=2)])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(got.state_dict()[name], value, rtol=0, atol=tolerance, msg=name)
    assert float(piped.callback_metrics["val/loss"]) == pytest.approx(
        float(plain.callback_metrics["val/loss"]), rel=tolerance
    )
    piped.save_checkpoint(tmp_path / "gpu.ckpt")
    again = piped.validate(got, Ordered(), ckpt_path=tmp_path / "gpu.ckpt", verbose=False)
    assert again[0]["val/loss"] > 0

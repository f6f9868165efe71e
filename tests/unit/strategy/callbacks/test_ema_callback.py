"""Averaged weights: the formula, their precision, their way through a checkpoint."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.callbacks.ema import EMA


class Drifting(L.LightningModule):
    """One weight that moves by a known amount each optimizer step, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.still = nn.Parameter(torch.ones(1), requires_grad=False)

    def training_step(self, batch: Any) -> Tensor:
        return -self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=1.0)


def fit(
    ema: EMA, *, num_steps: int, accumulate: int = 1, ckpt_path: str | None = None
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[ema],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.zeros(64, 1)))
    trainer.fit(Drifting(), loader, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def by_hand(decay: float, num_steps: int) -> float:
    """The definition, in double precision; after step t the weight is t."""
    average = 0.0
    for t in range(1, num_steps + 1):
        d = min(decay, (1 + t) / (10 + t))
        average = d * average + (1 - d) * t
    return average


@pytest.mark.parametrize(("decay", "num_steps"), [(0.0, 5), (0.5, 7), (0.9, 20), (0.999, 30)])
def test_the_average_follows_its_definition(decay: float, num_steps: int) -> None:
    ema = EMA(decay)
    fit(ema, num_steps=num_steps)
    assert list(ema.average) == ["weight"]
    assert float(ema.average["weight"]) == pytest.approx(by_hand(decay, num_steps), rel=1e-5)


def test_it_moves_once_per_optimizer_step_not_per_batch() -> None:
    ema = EMA(0.5)
    fit(ema, num_steps=6, accumulate=3)
    assert ema.num_updates == 6
    assert float(ema.average["weight"]) == pytest.approx(by_hand(0.5, 6), rel=1e-5)


def test_it_moves_where_bfloat16_would_not() -> None:
    module: Any = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    ema = EMA(0.9999)
    trainer: Any = SimpleNamespace(global_step=10**6, strategy=SimpleNamespace(link=None))
    ema.on_fit_start(trainer, module)
    nn.init.zeros_(module.weight)
    for step in range(1000):
        trainer.global_step = 10**6 + step
        ema.on_train_batch_end(trainer, module, None, None, 0)
    assert ema.average["weight"].dtype is torch.float32
    assert float(ema.average["weight"]) == pytest.approx(0.9999**1000, rel=1e-3)


def test_a_resumed_average_is_the_uninterrupted_one(tmp_path: Any) -> None:
    whole, first, second = EMA(0.8), EMA(0.8), EMA(0.8)
    fit(whole, num_steps=12)
    path = str(tmp_path / "half.ckpt")
    fit(first, num_steps=5).save_checkpoint(path)
    fit(second, num_steps=12, ckpt_path=path)
    assert torch.equal(second.average["weight"], whole.average["weight"])
    assert second.num_updates == 12
    saved = torch.load(path, weights_only=False)
    assert float(saved["state_dict"]["weight"]) == 5.0  # the weights themselves, not the average


def test_bad_decay_and_a_foreign_checkpoint_are_refused() -> None:
    with pytest.raises(DPipeError, match=r"EMA decay is 1.0; expected a value in \[0, 1\)"):
        EMA(1.0)
    ema = EMA()
    ema.average = {"weight": torch.zeros(1)}
    with pytest.raises(DPipeError, match="no averaged weight 'weight'"):
        ema.load_state_dict({"num_updates": 1, "average": {"other": torch.zeros(1)}})

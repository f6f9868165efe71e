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


class Watched(Drifting):
    """Notes the weight that validation sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any) -> None:
        self.seen.append(float(self.weight))


class Saving(L.Callback):
    """Stands before the EMA in the list and keeps what a checkpoint would hold."""

    def __init__(self) -> None:
        self.files: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.files.append(float(trainer.strategy.lightning_module_state_dict()["weight"]))


def validated(ema: EMA, **flags: Any) -> tuple[L.Trainer, Watched, Saving]:
    module, saving = Watched(), Saving()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, val_check_interval=2, callbacks=[saving, ema],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **flags,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)))
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.zeros(1, 1))))
    return trainer, module, saving


def test_validation_sees_the_average_and_training_goes_on_with_the_weights() -> None:
    trainer, module, saving = validated(EMA(0.5))
    expected = [0.0, by_hand(0.5, 2), by_hand(0.5, 4)]  # the first is the sanity check
    assert sorted(set(module.seen)) == pytest.approx(expected, rel=1e-5)
    assert saving.files == [1.0, 2.0, 3.0, 4.0]
    assert float(trainer.strategy.lightning_module_state_dict()["weight"]) == 4.0
    raw = validated(EMA(0.5, evaluate=False))[1]
    assert sorted(set(raw.seen)) == [0.0, 2.0, 4.0]


def test_under_bfloat16_the_average_is_float32_and_the_weights_stay_bfloat16() -> None:
    ema = EMA(0.5)
    _, module, _ = validated(ema, precision="bf16-true")
    assert module.weight.dtype is torch.bfloat16
    assert float(module.weight) == 4.0
    assert ema.average["weight"].dtype is torch.float32
    assert float(ema.average["weight"]) == pytest.approx(by_hand(0.5, 4), rel=1e-6)
    rounded = float(torch.tensor(by_hand(0.5, 4)).bfloat16())
    assert module.seen[-1] == rounded


def test_a_failure_in_validation_leaves_the_weights() -> None:
    class Failing(Watched):
        def validation_step(self, batch: Any) -> None:
            if not self.trainer.sanity_checking:
                raise ArithmeticError("as asked")

    ema, module = EMA(0.5), Failing()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, val_check_interval=2, callbacks=[ema], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)))
    with pytest.raises(ArithmeticError, match="as asked"):
        trainer.fit(module, loader, loader)
    assert float(module.weight) == 2.0


def test_validating_a_checkpoint_uses_the_average_in_it(tmp_path: Any) -> None:
    trainer, _, _ = validated(EMA(0.5))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Watched()
    again = L.Trainer(
        accelerator="cpu", callbacks=[EMA(0.5)], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(1, 1)))
    again.validate(module, loader, ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert module.seen == pytest.approx([by_hand(0.5, 4)], rel=1e-5)
    assert float(module.weight) == 4.0

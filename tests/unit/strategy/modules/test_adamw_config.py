"""The recipes' learning rate over steps."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig


class Module(nn.Linear):
    def __init__(self, num_steps: float) -> None:
        super().__init__(2, 2)
        self.trainer = SimpleNamespace(estimated_stepping_batches=num_steps)


def rates(config: AdamWConfig, num_steps: int) -> list[float]:
    module: Any = Module(num_steps)
    built = config.build(module)
    optimizer, schedule = built["optimizer"], built["lr_scheduler"]["scheduler"]
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_constant_after_warmup() -> None:
    found = rates(AdamWConfig(lr=1.0, warmup_steps=4), 8)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_linear_reaches_its_end_at_the_last_step() -> None:
    found = rates(AdamWConfig(lr=2.0, warmup_steps=2, decay="linear", end=0.5), 12)
    assert found[:2] == pytest.approx([1.0, 2.0])
    assert found[2:] == pytest.approx([2.0 - i * 0.1 for i in range(10)])


def test_cosine_is_the_one_of_transformers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, 0, 20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(AdamWConfig(lr=1.0, decay="cosine"), 20) == pytest.approx(expected)


def test_decay_without_an_end_is_refused() -> None:
    module: Any = Module(float("inf"))
    with pytest.raises(DPipeError, match=r"decay='linear' .* set trainer.max_steps=N"):
        AdamWConfig(decay="linear").build(module)


def test_frozen_parameters_are_left_out() -> None:
    module: Any = Module(10)
    module.bias.requires_grad_(False)
    (group,) = AdamWConfig().build(module)["optimizer"].param_groups
    assert [p.shape for p in group["params"]] == [(2, 2)]


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_cosine_ends_with_the_run_whatever_is_accumulated(window: int, tmp_path: Path) -> None:
    """10 batches an epoch; a window that does not divide them ends short."""

    class Learner(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.rates: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            return AdamWConfig(lr=1.0, decay="cosine").build(self)

    data = DataLoader(TensorDataset(torch.ones(20, 1)), batch_size=2)
    module = Learner()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=window, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, data)
    steps = 2 * math.ceil(10 / window)
    expected = [0.5 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]
    assert module.rates == pytest.approx(expected)

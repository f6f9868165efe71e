"""`BubbleFill(cache="disk")` behind a Trainer of one process, and what it refuses."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.callbacks.ledger import Ledger
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from toy import Images, Toy, ToyData

RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A world of one, taken down afterwards; profiles are kept for this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class Losses(Ledger):
    """Every step's loss, and its time ledger."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1, first_step=2, picture=False)
        self.losses: list[float] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.seen = 0  # not what was measured for the plan

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


class Counted(Toy):
    """Counts the samples that its encoder sees in training."""

    seen = 0

    def configure_model(self) -> None:
        fresh = self.blocks is None
        super().configure_model()
        if fresh:
            self.encoder[0].register_forward_hook(self._count)

    def _count(self, module: Any, inputs: Any, output: Tensor) -> None:
        if self._trainer is not None and self.trainer.training:
            self.seen += len(output)


def fit(fill: BubbleFill, data: Any = None, **flags: Any) -> tuple[Losses, Counted]:
    torch.manual_seed(0)
    losses, module = Losses(), Counted(self_conditioning=True)
    defaults: dict[str, Any] = {
        "max_epochs": 3, "accelerator": "cpu", "devices": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "limit_val_batches": 0,
    }  # fmt: skip
    run = Trainer(
        strategy=DiffusionPipeStrategy(), callbacks=[fill, losses], **{**defaults, **flags}
    )
    run.fit(module, data or ToyData(count=24, batch_size=8))
    return losses, module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_sample_is_encoded_once_in_three_epochs_and_the_losses_are_the_same(
    tmp_path: Path, precision: Any
) -> None:
    plain, without = fit(BubbleFill(), precision=precision)
    keeps = BubbleFill("disk", tmp_path / "kept")
    kept, module = fit(keeps, precision=precision)
    assert kept.losses == plain.losses
    assert (without.seen, module.seen) == (3 * 24, 24)
    assert kept.timeline is not None
    assert kept.predicted is not None
    resumed, module = fit(BubbleFill("disk", tmp_path / "kept"), precision=precision, max_epochs=1)
    assert resumed.losses == plain.losses[:3]
    assert module.seen == 0


def test_accumulation_and_a_limit_go_with_it(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"accumulate_grad_batches": 2, "limit_train_batches": 2}
    plain, _ = fit(BubbleFill(), **flags)
    kept, _ = fit(BubbleFill("disk", tmp_path / "kept"), **flags)
    assert kept.losses == plain.losses


class Flipped(Images):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | {"image": sample["image"] * (1 - 2 * torch.randint(2, (1,)))}


class Augmented(ToyData):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Flipped(self.count), batch_size=self.batch_size)


def test_random_augmentation_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    data = Augmented(count=24, batch_size=8)
    with pytest.raises(UnsupportedError, match=r"field 'image' of sample \d+ changes from"):
        fit(BubbleFill("disk", tmp_path / "kept"), data)
    fit(BubbleFill("off"), data, max_epochs=1)  # in bubbles it is encoded as it comes


def test_a_look_at_the_data_leaves_the_random_state_alone(tmp_path: Path) -> None:
    class Noted(Images):
        drawn: list[float]

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.drawn.append(float(torch.rand(())))
            return super().__getitem__(index)

    class Noting(ToyData):
        def train_dataloader(self) -> DataLoader[Any]:
            self.data = Noted(self.count)
            self.data.drawn = []
            return DataLoader(self.data, batch_size=self.batch_size)

    drawn = []
    for fill in (BubbleFill(), BubbleFill("disk", tmp_path / "kept")):
        data = Noting(count=16, batch_size=8)
        fit(fill, data, max_epochs=1)
        drawn.append(data.data.drawn[-16:])
    assert drawn[0] == drawn[1]


def test_an_unknown_kind_of_cache_is_refused_and_yamls_off_is_off() -> None:
    with pytest.raises(UnsupportedError, match='choose "disk" or "off"'):
        BubbleFill("memory")
    assert not BubbleFill(False).keeps

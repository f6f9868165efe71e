"""The loss at nine fixed timesteps: by hand, the same for every strategy, on disk."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from PIL import Image

from bucketed import BASE, Bucketed, BucketedData
from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.strategy.callbacks.ema import EMA
from lightning_dpipe.strategy.callbacks.timestep_losses import LEVELS, TimestepLosses, key_of
from lightning_dpipe.strategy.local import sample_losses
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from toy import Toy, ToyData

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


def run(strategy: Any, callback: TimestepLosses, *more: Any, module: Any = None, **flags: Any):
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, *more], **flags,
    )  # fmt: skip
    module = module or Bucketed()
    trainer.fit(module, BucketedData({BASE: 5}, batch_size=2))
    return trainer, module


def by_hand(module: Bucketed, level: int) -> float:
    """Every sample's loss at a timestep that is written down, not drawn."""
    total, count = 0.0, 0
    for batch in BucketedData({BASE: 5}, batch_size=2).val_dataloader():
        rows = len(batch["image"])
        keys = torch.tensor([[-1 - level * 2**32, count + i] for i in range(rows)])
        with torch.no_grad():
            losses = sample_losses(module.spec, batch | {DRAW_KEY: keys}, self_conditioned=False)
        total += float(losses["unet"].sum())
        count += rows
    return total / count


def test_the_curve_is_the_mean_loss_at_each_timestep_under_every_strategy(tmp_path: Path) -> None:
    curves = {}
    for name, strategy in (("plain", "auto"), ("pipe", DiffusionPipeStrategy())):
        trainer, module = run(strategy, TimestepLosses(tmp_path / name))
        curves[name] = [float(trainer.callback_metrics[key_of(level)]) for level in LEVELS]
        drawn = float(trainer.callback_metrics["val/loss"])
        expected = [by_hand(module, level) for level in LEVELS]
        assert curves[name] == pytest.approx(expected, rel=1e-5)
        assert drawn not in curves[name]
        with (tmp_path / name / "timestep_losses.csv").open(newline="") as file:
            head, first, last = csv.reader(file)
        assert head == ["step", *(key_of(level) for level in LEVELS)]
        assert (first[0], last[0]) == ("3", "6")
        assert list(map(float, last[1:])) == curves[name]
        with Image.open(tmp_path / name / "timestep_losses.png") as picture:
            assert min(picture.size) > 100
    assert curves["plain"] == pytest.approx(curves["pipe"], rel=1e-5)
    assert len(set(curves["plain"])) == len(LEVELS)


def test_it_changes_no_step_and_sees_the_average(tmp_path: Path) -> None:
    without = run("auto", TimestepLosses(tmp_path, num_batches=0))
    once = run("auto", TimestepLosses(tmp_path, num_batches=1, picture=False))
    for name, value in without[1].state_dict().items():
        assert torch.equal(once[1].state_dict()[name], value)
    assert key_of(1) not in without[0].callback_metrics
    ema = EMA(0.5)
    averaged, module = run("auto", TimestepLosses(tmp_path, picture=False), ema)
    for name, p in module.named_parameters():
        if name in ema.average:
            p.data = ema.average[name]
    value = float(averaged.callback_metrics[key_of(5)])
    assert value == pytest.approx(by_hand(module, 5), rel=1e-5)


def test_a_resumed_run_has_all_curves(tmp_path: Path) -> None:
    callback, again = TimestepLosses(tmp_path, picture=False), TimestepLosses(tmp_path)
    run("auto", callback)
    again.load_state_dict(callback.state_dict())
    assert sorted(again.curves) == [3, 6]


def test_a_model_with_timesteps_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[TimestepLosses(tmp_path)])
    with pytest.raises(UnsupportedError, match="which Toy does not use"):
        trainer.fit(Toy(), ToyData())

"""Two real ranks train on batches of five shape classes like one process on the joint batches."""

import functools
import os
import socket
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from bucketed import SIDES, Bucketed, BucketedData, Pictures
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy
from ranks import run_ranks

COUNTS = {BASE: 22, "wide": 16, "tall": 10, "flat": 18, "slim": 8}
"""Global batches of 8 leave short ones of 6, 2 and 2 samples over."""

pytestmark = pytest.mark.dist


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.classes: list[tuple[str, str]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train/loss"]))
        installed = getattr(trainer.strategy, "_installed", None)
        if installed is not None:
            self.classes = [
                (s.bucket, s.next_bucket) for s in installed.session._programs if s.training
            ]


def trainer(folder: str, strategy: Any, devices: int, *callbacks: Callback) -> Trainer:
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, logger=False,
        accumulate_grad_batches=2, callbacks=list(callbacks), default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def as_rank(rank: int, folder: str, port: int) -> None:
    """What a launcher tells a process of one node; the Trainer connects the ranks itself."""
    dist.barrier()  # none is still connecting
    dist.destroy_process_group()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "XDG_CACHE_HOME": folder}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def fit_rank(rank: int, folder: str, port: int, selfcond: bool, fill: bool) -> Any:
    as_rank(rank, folder, port)
    losses = Losses()
    strategy = DiffusionPipeStrategy(num_microbatches=2)
    callbacks = (losses, BubbleFill()) if fill else (losses,)
    run = trainer(folder, strategy, 2, *callbacks)
    module = Bucketed(selfcond=selfcond)
    run.fit(module, BucketedData(COUNTS, 4))
    state = strategy.lightning_module_state_dict()
    return losses.seen, losses.classes, state, float(run.callback_metrics["val/loss"])


@functools.cache
def one_process(selfcond: bool) -> Any:
    losses = Losses()
    module = Bucketed(selfcond=selfcond)
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(folder, "auto", 1, losses)
        run.fit(module, BucketedData(COUNTS, 8))
    return losses.seen, module.state_dict(), float(run.callback_metrics["val/loss"])


@pytest.mark.parametrize(("selfcond", "fill"), [(True, True), (False, False)])
def test_a_fit_on_five_classes_equals_one_process(selfcond: bool, fill: bool, tmp_path) -> None:
    losses, state, val = one_process(selfcond)
    (seen, classes, found, val_found), _ = run_ranks(
        fit_rank, 2, str(tmp_path), free_port(), selfcond, fill, timeout_s=240
    )
    assert len(seen) == 2 * (3 + 2 + 2 + 3 + 1)
    assert seen == pytest.approx(losses, rel=1e-5)
    assert val_found == pytest.approx(val, rel=1e-5)
    assert {b for b, _ in classes} == set(SIDES)
    if fill:
        assert len(set(classes)) > len(SIDES), "no batch was encoded ahead of another class's"
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


def refused_rank(rank: int, folder: str, port: int, wrong: tuple[str, str]) -> str:
    """Rank r's batches are of class ``wrong[r]``."""
    as_rank(rank, folder, port)
    if wrong[rank] == "odd":
        SIDES["odd"] = (10, 10)
    loader = DataLoader(Pictures([wrong[rank]] * 8), batch_size=4)
    run = trainer(folder, DiffusionPipeStrategy(), 2)
    with pytest.raises(DPipeError) as caught:
        run.fit(Refusing(), loader)
    assert run.global_step == 0
    return f"{type(caught.value).__name__}: {caught.value}"


class Refusing(Bucketed):
    """Its classes are made before the test adds one that nobody declared."""

    def pipeline_spec(self) -> Any:
        odd = SIDES.pop("odd", None)
        spec = super().pipeline_spec()
        if odd is not None:
            SIDES["odd"] = odd
        return spec


def test_ranks_of_different_classes_are_refused_on_all(tmp_path) -> None:
    errors = run_ranks(refused_rank, 2, str(tmp_path), free_port(), ("wide", "tall"), timeout_s=120)
    for error in errors:
        assert error.startswith("DataError: ")
        assert "'wide' on ranks [0], 'tall' on ranks [1]" in error


def test_an_undeclared_shape_on_one_rank_is_refused_on_all(tmp_path) -> None:
    errors = run_ranks(refused_rank, 2, str(tmp_path), free_port(), (BASE, "odd"), timeout_s=120)
    assert errors[1].startswith("SpecError: ")
    assert errors[0].startswith("DPipeError: rank 1: SpecError: ")
    for error in errors:
        assert "'image' (3, 10, 10)" in error
        assert "wide: image (3, 12, 20)" in error

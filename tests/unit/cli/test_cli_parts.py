"""Threads of a rank, and what the console leaves out."""

import logging
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from omegaconf import OmegaConf

from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.parts import one_thread_per_rank
from lightning_dpipe.cli.report import limits_text
from lightning_dpipe.cli.summary import run_line
from lightning_dpipe.cli.train import build_callbacks
from lightning_dpipe.planning.explain import Limit


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("devices", "accelerator", "given", "threads"),
    [(2, "cpu", None, 1), (4, "auto", None, 1), (2, "cpu", "2", 2), (1, "cpu", None, 2)],
)
def test_ranks_that_share_a_cpu_use_one_thread_unless_the_user_chose(
    devices: int,
    accelerator: str,
    given: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    trainer = {"devices": devices, "accelerator": accelerator}
    one_thread_per_rank(OmegaConf.create({"trainer": trainer}))
    assert torch.get_num_threads() == threads
    if devices > 1:  # children inherit it
        assert os.environ["OMP_NUM_THREADS"] == str(threads)


def test_gpus_keep_their_host_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    one_thread_per_rank(OmegaConf.create({"trainer": {"devices": 2, "accelerator": "auto"}}))
    assert torch.get_num_threads() == 2


def test_expected_warnings_are_left_out_and_others_are_not() -> None:
    handlers = logging.getLogger("lightning").handlers[:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configure_console()
        warnings.warn("Found 45 module(s) in eval mode at the start of training.", stacklevel=1)
        warnings.warn("the loss is not finite", stacklevel=1)
    logging.getLogger("lightning").handlers[:] = handlers
    assert [str(w.message) for w in caught] == ["the loss is not finite"]


@pytest.mark.parametrize("logs", [True, False])
def test_a_run_without_a_logger_has_no_callback_that_needs_one(logs: bool) -> None:
    names = {"rate": "LearningRateMonitor", "checkpoint": "ModelCheckpoint"}
    callbacks = {k: {"_target_": f"lightning.pytorch.callbacks.{v}"} for k, v in names.items()}
    made = build_callbacks(OmegaConf.create({"callbacks": callbacks | {"none": None}}), logs=logs)
    assert [type(c) for c in made] == [LearningRateMonitor, ModelCheckpoint][not logs :]


def test_limits_that_overlap_say_so() -> None:
    def text(*shares: float) -> str:
        return limits_text([Limit(kind="bubble", share=share, text="bubbles") for share in shares])

    assert "overlap" in text(0.7, 0.4)
    assert "overlap" not in text(0.7, 0.2)


def test_the_command_that_uploads_a_run_works_in_a_folder_with_a_space() -> None:
    folder = Path("/data/my runs/wandb/offline-run")
    shown = run_line(folder, offline=True)
    assert shlex.split(shown.split("upload it: ")[1].rstrip(")")) == ["wandb", "sync", str(folder)]
    assert run_line(folder, offline=False) == str(folder)

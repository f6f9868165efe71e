"""Threads of a rank, and what the console leaves out."""

import logging
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from omegaconf import OmegaConf

from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.parts import one_thread_per_rank


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

"""The report of a sweep: what became of each job, whatever the sweeper."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_dpipe.cli.app import run_app
from lightning_dpipe.cli.sweep import Sweep
from lightning_dpipe.core.errors import CAUSE, PlanError


def task(config: DictConfig) -> float | None:
    """Fails, is stopped, or gives its seed."""
    if config.seed == 2:
        raise PlanError("seed 2 is refused; use another\nmore of it")
    if config.seed == 3:
        error = RuntimeError("lost a connection")
        if hasattr(error, "add_note"):
            error.add_note(f"{CAUSE}rank 1 failed: RuntimeError: boom")
        raise error
    return None if config.seed == 4 else config.seed / 8


def test_one_line_a_job_with_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", "seed=1,2,3,4", "trainer.max_steps=7", "optimized_metric=val/loss"]
    assert run_app(task, prefix=("train",), arguments=arguments) == 2
    printed = capsys.readouterr()
    report = printed.out[printed.out.index("sweep ") :].splitlines()
    assert report[0] == "sweep       4 jobs, 2 failed"
    assert report[1].split() == ["job", "overrides", "outcome", "time", "val/loss", "folder"]
    rows = [line.split() for line in report[2:6]]
    assert [row[:4] for row in rows] == [
        ["0", "seed=1", "done", "0"], ["1", "seed=2", "FAILED", "0"],
        ["2", "seed=3", "FAILED", "0"], ["3", "seed=4", "done", "0"],
    ]  # fmt: skip
    assert [row[5] for row in rows] == ["0.125", "-", "-", "-"]
    folders = [tmp_path / row[-1] for row in rows]
    assert [OmegaConf.load(f / ".hydra/config.yaml").seed for f in folders] == [1, 2, 3, 4]
    assert report[6] == "job 1: PlanError: seed 2 is refused; use another"
    if sys.version_info >= (3, 11):  # notes on exceptions
        assert report[7] == "job 2: rank 1 failed: RuntimeError: boom"
    assert "Error executing job" not in printed.err


def test_what_stops_a_sweep_leaves_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(config: DictConfig) -> None:
        if config.seed == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_app(stopped, prefix=("train",), arguments=["-m", "seed=1,2,3"])
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split()[:3] for row in rows] == [
        ["0", "seed=1", "done"],
        ["1", "seed=2", "stopped"],
    ]


def test_a_sweeper_that_chooses_by_values_learns_of_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hydra: Any = OmegaConf.create(
        {
            "sweeper": {"_target_": "hydra_plugins.other.OtherSweeper"},
            "job": {"num": 5},
            "overrides": {"task": ["seed=2"]},
            "runtime": {"output_dir": "x/5"},
        }
    )
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    sweep = Sweep(clock=lambda: 0.0)
    with pytest.raises(PlanError):
        sweep.run(task, OmegaConf.create({"seed": 2}), lambda error: 2)
    assert (sweep.codes, sweep.jobs[0].outcome) == ([2], "FAILED")
    assert sweep.run(task, OmegaConf.create({"seed": 1}), lambda error: 2) == 0.125
    hydra.sweeper._target_ = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
    assert sweep.run(task, OmegaConf.create({"seed": 2}), lambda error: 2) is None

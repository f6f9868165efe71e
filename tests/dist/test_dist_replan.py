"""Re-planning on two real ranks: the same losses, the same switch at the same step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_dpipe.core.jsonio import digest, from_data
from lightning_dpipe.core.plan import Plan

pytestmark = pytest.mark.dist

JOB = Path(__file__).with_name("replan_job.py")
LIMIT_S = 240


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("replan")
    paths = [str(JOB.parents[2] / "src"), str(JOB.parents[1])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(JOB), str(folder)],
        env={**os.environ, **variables},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    found = {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
        for name in ("plain", "asked", "forced")
    }
    saved = json.loads((folder / "plan.json").read_text())
    return {**found, "saved": [saved]}


def column(run: dict[str, Any], name: str) -> list[Any]:
    return [row.get(name) for row in run["rows"]]


@pytest.mark.parametrize("name", ["asked", "forced"])
def test_losses_and_weights_are_those_of_the_run_without(runs: Any, name: str) -> None:
    for plain, other in zip(runs["plain"], runs[name], strict=True):
        expected = column(plain, "train/loss")
        assert len(expected) == 36
        assert column(other, "train/loss") == pytest.approx(expected, rel=1e-5)
        validated = column(plain, "val/loss")[-9:]
        assert column(other, "val/loss")[-9:] == pytest.approx(validated, rel=1e-5)
        assert other["weights"] == pytest.approx(plain["weights"], rel=1e-5)


def test_other_fills_of_the_same_slices_change_no_bit(runs: Any) -> None:
    for plain, forced in zip(runs["plain"], runs["forced"], strict=True):
        assert column(forced, "train/loss") == column(plain, "train/loss")
        assert forced["weights"] == plain["weights"]


def test_all_ranks_switch_at_the_same_step_and_say_what_it_brought(runs: Any) -> None:
    first, second = runs["forced"]
    assert column(first, "plan") == column(second, "plan")
    assert len(set(column(first, "plan"))) >= 2
    for name in ("replan/predicted_gain", "replan/before_s", "replan/after_s", "replan/kept"):
        assert column(first, name) == column(second, name)
    rows = [row for row in first["rows"] if "replan/kept" in row]
    assert rows
    for row in rows:
        slower = row["replan/after_s"] > row["replan/before_s"]
        assert row["replan/kept"] == float(not slower)
        assert row["replan/predicted_gain"] == 0.5


def test_the_runs_plan_file_is_the_plan_that_proved_itself(runs: Any) -> None:
    saved = digest(from_data(Plan, runs["saved"][0]))
    assert saved == runs["forced"][0]["rows"][-1]["settled"]

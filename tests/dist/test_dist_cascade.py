"""Two diffusers U-Nets train side by side on two real ranks as they do in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cascade_job
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan

pytestmark = pytest.mark.dist

JOB = Path(cascade_job.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipelines' files, and those of one process on the joint batch."""
    where = tmp_path_factory.mktemp("cascade")
    paths = [str(JOB.parents[2] / "src"), str(JOB.parents[1])]
    done = subprocess.run(
        [sys.executable, str(JOB), str(where)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(where)},
        cwd=where,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    cascade_job.train("one", where, strategy="auto", devices=1, fill=False)
    return where


def rows(folder: Path, name: str) -> dict[str, list[float]]:
    content: dict[str, list[float]] = json.loads((folder / f"{name}.json").read_text())
    return content


def saved(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / f"{name}.ckpt")
    return content


def test_the_backbones_go_in_opposite_directions(folder: Path) -> None:
    plan = load(Plan, folder / "plan.json")
    assert [(s.backbone, s.devices) for s in plan.stages] == [
        ("base", (0,)), ("base", (1,)), ("fine", (1,)), ("fine", (0,)),
    ]  # fmt: skip
    assert plan.fills


def test_both_losses_and_their_sum_are_one_process_s(folder: Path) -> None:
    one, piped = rows(folder, "one"), rows(folder, "filled")
    assert one.keys() == piped.keys()
    for name, values in one.items():
        assert piped[name] == pytest.approx(values, rel=2e-5), name
    assert len(one["train/loss"]) == 6
    assert one["train/loss"] != one["train/loss/base"]
    for total, base, fine in zip(*(piped[f"train/loss{x}"] for x in ("", "/base", "/fine"))):
        assert total == pytest.approx(base + fine, rel=1e-6)


def test_weights_averages_and_optimizer_states_are_one_process_s(folder: Path) -> None:
    one, piped = saved(folder, "one"), saved(folder, "filled")
    assert list(one["state_dict"]) == list(piped["state_dict"])
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(piped["state_dict"][name], value, rtol=0, atol=1e-6, msg=name)
    average = next(v for k, v in one["callbacks"].items() if k.startswith("EMA"))["average"]
    other = next(v for k, v in piped["callbacks"].items() if k.startswith("EMA"))["average"]
    assert average.keys() == other.keys()
    for name, value in average.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6, msg=name)
    states = [x["optimizer_states"][0] for x in (one, piped)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()


@pytest.mark.parametrize("other", ["unfilled", "resumed"])
def test_filling_and_resuming_change_no_bit(folder: Path, other: str) -> None:
    piped, found = rows(folder, "filled"), rows(folder, other)
    for name, values in found.items():
        assert values == piped[name][-len(values) :], name
    weights = saved(folder, other)["state_dict"]
    for name, value in saved(folder, "filled")["state_dict"].items():
        assert torch.equal(weights[name], value), name

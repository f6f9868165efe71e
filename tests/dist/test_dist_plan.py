"""Real ranks that search for their plan, and ranks that are given one that does not fit."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dpipe.core.jsonio import load, save
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.search import make_plan

pytestmark = pytest.mark.dist

JOB = Path(__file__).with_name("plan_job.py")


def run(folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    paths = [str(JOB.parents[2] / "src"), str(JOB.parents[1])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    done = run(folder, str(JOB), str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def losses(folder: Path, name: str, rank: int) -> list[float]:
    content: dict[str, Any] = json.loads((folder / f"{name}.{rank}.json").read_text())
    found: list[float] = content["losses"]
    return found


def test_whatever_the_search_chooses_trains_like_ddp(searched: Path) -> None:
    reference = torch.load(searched / "ddp.ckpt")["state_dict"]
    for name in ("auto", "one", "two"):
        for rank in range(2):
            expected = losses(searched, "ddp", rank)
            assert len(expected) == 8
            assert losses(searched, name, rank) == pytest.approx(expected, abs=1e-5)
        weights = torch.load(searched / f"{name}.ckpt")["state_dict"]
        assert list(weights) == list(reference)
        assert max(float((weights[n] - reference[n]).abs().max()) for n in reference) < 1e-5


def test_dear_messages_make_it_one_stage_and_a_dear_sum_two(searched: Path) -> None:
    plans = {n: load(Plan, searched / f"{n}.plan.0.json") for n in ("one", "two")}
    assert {n: p.num_devices for n, p in plans.items()} == {"one": 1, "two": 2}
    assert len(plans["one"].replica_sets[0]) == 2
    assert plans["one"].fills
    assert plans["two"].fills


def test_all_ranks_have_the_plan_of_rank_0(searched: Path) -> None:
    first, second = (json.loads((searched / f"digests.{r}.json").read_text()) for r in range(2))
    assert first == second
    assert set(first) == {"auto", "one", "two"}


QUICK = ("recipe=smoke", "data.batch_size=4", "strategy.num_microbatches=2")
TRAIN = ("-m", "lightning_dpipe.cli", "train", *QUICK, "trainer.devices=2", "logger=none")

REFUSED = {
    "world": "dpipe: the plan is for 4 ranks, this run has 2; plan again, or run on 4",
    "batch": "dpipe: the plan is for 4 samples per device, this run has 2; plan again, or use",
    "model": "dpipe: the plan is for graph {graph} with 17 layers in unet, this model is ",
    "version": "dpipe: the plan was made of profile {profile}, which is of another run: torch 0.1",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of the recipe on two ranks, and ones that fit less."""
    folder = tmp_path_factory.mktemp("plans")
    command = ("-m", "lightning_dpipe.cli", "plan", *QUICK, "trainer.devices=2")
    done = run(folder, *command, f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    profile = load(Profile, folder / "profile.json")
    wide = make_plan(profile, world_size=4, batch_size=4, num_stages=2, num_microbatches=2)
    save(wide, folder / "wide.json")
    plan = load(Plan, folder / "plan.json")
    assert plan.origin is not None
    versions = tuple((n, "0.1" if n == "torch" else v) for n, v in plan.origin.versions)
    save(replace(plan, origin=replace(plan.origin, versions=versions)), folder / "old.json")
    return folder


CASES = {
    "world": ("wide.json", ()),
    "batch": ("plan.json", ("data.batch_size=2",)),
    "model": ("plan.json", ("model.unet.layers_per_block=2",)),
    "version": ("old.json", ()),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_plan_that_does_not_fit_is_one_line_on_all_ranks(case: str, made: Path) -> None:
    file, extra = CASES[case]
    done = run(made, *TRAIN, f"strategy.plan={made / file}", *extra)
    assert done.returncode == 2, done.stdout + done.stderr
    plan = load(Plan, made / "plan.json")
    expected = REFUSED[case].format(graph=plan.graph_digest, profile=plan.profile_digest)
    assert expected in done.stderr
    for noise in ("Traceback", "Error executing job", "failed in", "ended with exit code"):
        assert noise not in done.stderr
    assert done.stderr.count("dpipe: ") == 1
    assert "train/loss" not in done.stdout

"""Commands of launched children, and what a launch leaves behind."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_dpipe.strategy import launcher


def job(task: list[str], hydra: list[str] | None = None, folder: str = "/out/0") -> Any:
    return SimpleNamespace(
        overrides=SimpleNamespace(task=task, hydra=hydra or []),
        runtime=SimpleNamespace(output_dir=folder),
    )


OWN = [
    "hydra.mode=RUN",
    'hydra.run.dir="/out/0"',
    "hydra.output_subdir=null",
    "hydra.job.name=rank_1",
]


@pytest.mark.parametrize(
    ("argv", "task", "hydra", "expected"),
    [
        (["-m", "seed=1,2"], ["seed=1"], [], ["seed=1"]),
        (["train", "--json", "recipe=x"], ["recipe=x"], [], ["train", "--json", "recipe=x"]),
        (["train", "-m", "seed=1,2"], ["seed=2"], [], ["train", "seed=2"]),
        (["-cn", "other", "a=1"], ["a=1"], [], ["--config-name=other", "a=1"]),
        (["--config-dir=/c", "a=1"], ["a=1"], [], ["--config-dir=/c", "a=1"]),
        (["+x=1", "~y"], ["+x=1", "~y"], [], ["+x=1", "~y"]),
        (["a='b=c,d'"], ["a='b=c,d'"], [], ["a='b=c,d'"]),
        (
            ["-m", "a=1"],
            ["a=1"],
            [
                "hydra.mode=MULTIRUN",
                "hydra/launcher=joblib",
                "hydra.sweep.dir=s",
                "hydra.verbose=true",
            ],
            ["a=1", "hydra.verbose=true"],
        ),
    ],
)
def test_a_child_runs_one_job_in_the_parents_folder(
    argv: list[str], task: list[str], hydra: list[str], expected: list[str]
) -> None:
    assert launcher.hydra_arguments(job(task, hydra), argv, 1) == [*expected, *OWN]


def test_a_folder_with_equals_and_commas_is_quoted() -> None:
    arguments = launcher.hydra_arguments(job([], folder="/out/lr=1,seed=2"), [], 3)
    assert 'hydra.run.dir="/out/lr=1,seed=2"' in arguments
    assert "hydra.job.name=rank_3" in arguments


def test_a_script_without_hydra_is_run_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    main = SimpleNamespace(__spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(launcher, "_hydra_job", lambda: None)
    command = [sys.executable, os.path.abspath("train.py"), "--lr", "1"]
    assert launcher.child_command(1) == (command, None)
    main.__spec__ = SimpleNamespace(name="pkg.train")
    assert launcher.child_command(1)[0] == [sys.executable, "-m", "pkg.train", "--lr", "1"]


def test_a_second_job_finds_the_environment_as_the_first_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[object] = [object()]
    monkeypatch.setattr(launcher, "_hydra_job", lambda: jobs[-1])
    monkeypatch.setattr(launcher, "_RECORD", launcher._Record())
    monkeypatch.setattr(launcher, "child_command", lambda rank: ([sys.executable, "-c", ""], None))
    for name in launcher._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    environment = LightningEnvironment()
    children: list[Any] = []
    first = launcher.DPipeLauncher(environment, 2, 1, children.extend)
    first.launch(lambda: None)
    assert len(children) == 1
    assert children[0].wait(30) == 0
    assert environment.creates_processes_externally
    port = os.environ["MASTER_PORT"]

    assert not launcher.reset_for_new_job(environment)  # the same job: fit, then test
    jobs.append(object())
    assert launcher.reset_for_new_job(environment)
    assert not environment.creates_processes_externally
    assert "MASTER_PORT" not in os.environ
    assert os.environ["NODE_RANK"] == "0"
    assert str(environment.main_port) != port
    assert not launcher.reset_for_new_job(environment)


def test_a_single_process_leaves_no_trace_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in launcher._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    launched = launcher.DPipeLauncher(LightningEnvironment(), 1, 1, lambda children: None)
    assert launched.launch(lambda: 7) == 7
    assert not any(name in os.environ for name in launcher._ENVIRONMENT)

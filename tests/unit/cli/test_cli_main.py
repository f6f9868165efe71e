"""`dpipe`: what it offers, what it hands to Hydra, how it reports errors."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_dpipe.cli.__main__ import COMMANDS, main
from lightning_dpipe.cli.app import JobFailedError, run_app
from lightning_dpipe.cli.parts import build_module, num_devices
from lightning_dpipe.cli.paths import config_dir, recipe_names
from lightning_dpipe.core.errors import DPipeError, PlanError

RECIPES = recipe_names()


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", list(overrides))


def test_help_lists_exactly_the_commands_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = text.split("commands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    for command in COMMANDS.values():
        run = importlib.import_module(command.module).run
        expected = ["arguments"] if command.plain else ["config", "flags"]
        assert list(inspect.signature(run).parameters) == expected
    assert all(recipe in text for recipe in RECIPES)


def test_an_unknown_command_is_named_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["trian"]) == 2
    assert (
        "'trian' is not a command; choose one of train, plan, profile, simulate, export, sample, "
        "verify, ls, cp" in capsys.readouterr().err
    )
    assert main([]) == 2


def test_own_flags_do_not_reach_hydra_and_the_job_sees_the_whole_command() -> None:
    seen: list[tuple[Any, list[str]]] = []
    before = list(sys.argv)
    code = run_app(
        lambda config: seen.append((config.seed, sys.argv[1:])),
        prefix=("plan", "--json"),
        arguments=["seed=5"],
    )
    assert code == 0
    assert seen == [(5, ["plan", "--json", "seed=5"])]
    assert sys.argv == before


@pytest.mark.parametrize("value", ["a b", "a, b", "k=v", "~/x y", "red, green=blue"])
def test_values_arrive_as_they_were_written(value: str) -> None:
    seen = []
    code = run_app(
        lambda config: seen.append(config.text), prefix=("train",), arguments=[f"+text='{value}'"]
    )
    assert (code, seen) == (0, [value])


def test_a_sweep_runs_one_job_a_value_in_folders_of_their_own(tmp_path: Path) -> None:
    seeds = []
    arguments = ["-m", "seed=1,2,3"]
    assert run_app(lambda c: seeds.append(c.seed), prefix=("train",), arguments=arguments) == 0
    assert seeds == [1, 2, 3]
    saved = sorted(tmp_path.glob("multirun/*/*/*/.hydra/config.yaml"))
    assert [OmegaConf.load(path).seed for path in saved] == [1, 2, 3]


def raising(error: Exception) -> Any:
    def task(config: DictConfig) -> None:
        raise error

    return task


@pytest.mark.parametrize(
    ("error", "code", "shown", "traceback"),
    [
        (PlanError("3 stages, 2 ranks; use 2"), 2, "dpipe: 3 stages, 2 ranks; use 2", False),
        (RuntimeError("boom"), 1, "RuntimeError: boom", True),
        (JobFailedError(), 1, "", False),
    ],
)
def test_bad_input_is_a_message_and_a_fault_is_a_traceback(
    error: Exception,
    code: int,
    shown: str,
    traceback: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(raising(error), prefix=("train",), arguments=[]) == code
    printed = capsys.readouterr().err
    assert shown in printed
    assert ("Traceback" in printed) is traceback


def test_bad_input_is_one_line_and_nothing_of_hydras(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["seed=5"]
    assert run_app(raising(PlanError("no")), prefix=("train",), arguments=arguments) == 2
    assert capsys.readouterr().err == "dpipe: no\n"


def test_a_sweep_reports_each_failure_when_it_happens(capsys: pytest.CaptureFixture[str]) -> None:
    def task(config: DictConfig) -> None:
        if config.seed == 1:
            raise PlanError("seed 1 is refused")
        print("printed by the job after it", file=sys.stderr)

    assert run_app(task, prefix=("train",), arguments=["-m", "seed=1,2"]) == 2
    printed = capsys.readouterr().err
    assert 0 <= printed.index("seed 1 is refused") < printed.index("printed by the job after it")


def test_config_mistakes_are_a_message_with_the_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(raising(AssertionError()), prefix=("train",), arguments=["recipe=smok"]) == 2
    printed = capsys.readouterr().err
    assert all(recipe in printed for recipe in RECIPES)
    arguments = ["trainer.max_step=3"]
    assert run_app(raising(AssertionError()), prefix=("train",), arguments=arguments) == 2
    printed = capsys.readouterr().err
    assert "max_step" in printed
    assert "Traceback" not in printed


def targets(node: Any) -> Iterator[str]:
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield node["_target_"]
        for key in node:
            if not OmegaConf.is_interpolation(node, key):
                yield from targets(node[key])
    elif isinstance(node, ListConfig):
        for item in node:
            yield from targets(item)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_names_classes_that_exist(recipe: str) -> None:
    found = list(targets(composed(f"recipe={recipe}")))
    assert len(found) > 8
    for target in found:
        assert callable(get_object(target))


def test_without_a_recipe_the_message_says_how_to_choose() -> None:
    with pytest.raises(DPipeError, match=r"give a recipe .*smoke.* or model\._target_="):
        build_module(composed())


def test_a_target_of_another_kind_is_refused() -> None:
    with pytest.raises(DPipeError, match="makes a Identity, which is not a DiffusionModule"):
        build_module(composed("model._target_=torch.nn.Identity"))


@pytest.mark.parametrize(("devices", "expected"), [("3", 3), ("'2'", 2), ("[0,1]", 2), ("auto", 1)])
def test_devices_are_counted_as_lightning_counts_them(devices: str, expected: int) -> None:
    config = composed("trainer=cpu", f"trainer.devices={devices}")
    assert num_devices(config) == expected

"""`dpipe ls` shows what there is; `dpipe cp` makes a copy that runs."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.cli.ls import first_words
from lightning_dpipe.cli.paths import config_dir, recipe_names


def test_ls_names_every_recipe_and_group_and_says_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ls"]) == 0
    shown = capsys.readouterr().out.splitlines()
    paths = list(config_dir().glob("*/*.yaml"))
    assert len(shown) == len(paths) + len({path.parent for path in paths})
    for path in paths:
        (line,) = (x for x in shown if x.split()[0] == path.stem and first_words(path) in x)
        assert len(line.split()) > 2, "a config begins with a comment that says what it is"
    assert main(["ls", "recipe"]) == 0
    assert [x.split()[0] for x in capsys.readouterr().out.splitlines()[1:]] == list(recipe_names())


def test_ls_of_no_group_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "recipes"]) == 2
    assert "'recipes' is no config group; there are recipe, callbacks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# @package _global_\n#\n# A thing: with\n# details.\nx: 1\n", "A thing: with details"),
        ("# One line\n# goes on, and ends here. No more.\n", "One line goes on, and ends here"),
        ("# Only this.\nx: 1\n", "Only this"),
        ("x: 1 # not this\n", ""),
        (f"# {'word ' * 40}\n", "word " * 17 + "..."),
    ],
)
def test_a_first_sentence_may_go_over_lines(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert first_words(path) == expected


@pytest.mark.parametrize("recipe", ["smoke", "controlnet_tiny"])
def test_a_changed_copy_is_what_runs(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a recipe that builds on another one of the package."""
    assert main(["cp", recipe]) == 0
    copied, said = capsys.readouterr().out.splitlines()
    path = tmp_path / copied
    shipped = config_dir() / "recipe" / f"{recipe}.yaml"
    assert path.read_text() == shipped.read_text()
    with path.open("a") as file:
        file.write("\nseed: 77\n")
    command = said.removeprefix("run it: dpipe ").split()
    assert main([*command, "--cfg", "job"]) == 0
    ours = OmegaConf.create(capsys.readouterr().out)
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        theirs = compose("config", [f"recipe={recipe}"])
    assert ours.seed == 77
    assert ours.model == theirs.model
    assert ours.trainer.max_steps == theirs.trainer.max_steps


def test_a_file_that_is_there_is_kept_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "lab" / "recipe" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    assert main(["cp", "smoke", str(mine)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert mine.read_text() == "precious"
    assert main(["cp", "smoke", str(mine), "--force"]) == 0
    assert f"--config-dir {tmp_path / 'lab'} recipe=mine" in capsys.readouterr().out
    assert mine.read_text() != "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smok"], "'smok' is no recipe; there are .*smoke"),
        (["smoke", "mine.yaml"], "use recipe/mine.yaml"),
        (["smoke", "recipe/mine"], "use recipe/mine.yaml"),
        (["smoke", "recipe/smoke.yaml"], "use another name, such as recipe/my_smoke.yaml"),
    ],
)
def test_a_copy_that_would_not_run_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cp", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []

"""Config and recipes travel inside the wheel, built from the repository or from an sdist."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECKED = ("src", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel built from a copy of the checkout, wheel built from the sdist of that copy)."""
    base = tmp_path_factory.mktemp("build")
    checkout = base / "checkout"
    checkout.mkdir()
    for name in CHECKED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("*.pyc")
            )
        else:
            shutil.copy(ROOT / name, checkout / name)
    _build(checkout, base / "dist", "sdist", "wheel")
    (sdist,) = (base / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "sdist", filter="data")
    (unpacked,) = (base / "sdist").iterdir()
    _build(unpacked, base / "second", "wheel")
    return next((base / "dist").glob("*.whl")), next((base / "second").glob("*.whl"))


def _build(source: Path, target: Path, *kinds: str) -> None:
    chosen = [argument for kind in kinds for argument in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *chosen]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_wheels_hold_every_config_and_recipe(wheels: tuple[Path, Path]) -> None:
    expected = {
        f"lightning_dpipe/conf/{path.relative_to(ROOT / 'conf').as_posix()}"
        for path in (ROOT / "conf").rglob("*")
        if path.is_file() and path.relative_to(ROOT / "conf").parts[0] != "recipe"
    } | {f"lightning_dpipe/conf/recipe/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(expected) > 8
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            held = {n for n in archive.namelist() if "/conf/" in n and not n.endswith("/")}
        assert held == expected


@pytest.mark.parametrize("origin", ["checkout", "sdist"])
def test_an_installed_wheel_composes_from_any_folder(
    wheels: tuple[Path, Path], origin: str, tmp_path: Path
) -> None:
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheels[origin == "sdist"]) as archive:
        archive.extractall(installed)
    command = [sys.executable, "-m", "lightning_dpipe.cli", "train", "recipe=smoke", "--cfg", "job"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "_target_: lightning.pytorch.Trainer" in done.stdout

"""``dpipe cp RECIPE [FILE]``: copy a recipe out, to change it and to run the copy.

In: the name of a recipe, and where to write it (by default ``recipe/my_RECIPE.yaml`` here). Out:
the file, and the command that runs it. A file that is there is kept, unless ``--force`` is given.

Hydra finds the copy if its folder is called ``recipe`` and the folder around that is given with
``--config-dir``; the package's own configs come first, so that the copy needs a name of its own.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dpipe.cli.paths import config_dir, recipe_names
from lightning_dpipe.core.errors import DPipeError

FOLDER = "recipe"


def run(arguments: Sequence[str]) -> int:
    """Copy; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dpipe cp", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", help="its name, see dpipe ls")
    parser.add_argument("file", type=Path, nargs="?", help="by default recipe/my_RECIPE.yaml")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")
    chosen = parser.parse_args(arguments)
    try:
        target = copy_recipe(chosen.recipe, chosen.file, force=chosen.force)
    except (DPipeError, OSError) as error:
        print(f"dpipe: {error}", file=sys.stderr)
        return 2
    around = shlex.quote(str(target.parent.parent))
    print(f"{target}\nrun it: dpipe train --config-dir {around} recipe={target.stem}")
    return 0


def copy_recipe(name: str, file: Path | None, *, force: bool) -> Path:
    """Write the copy and return its path.

    Raises:
        DPipeError: There is no such recipe, or the copy would not be found or cost a file.
    """
    if name not in recipe_names():
        raise DPipeError(f"{name!r} is no recipe; there are {', '.join(recipe_names())}")
    target = Path(FOLDER) / f"my_{name}.yaml" if file is None else file
    if target.suffix != ".yaml" or target.absolute().parent.name != FOLDER:
        inside = target.absolute().parent.name == FOLDER
        better = (target.parent if inside else target.parent / FOLDER) / f"{target.stem}.yaml"
        raise DPipeError(
            f"{target}: Hydra finds recipes that end in .yaml in a folder called {FOLDER}; "
            f"use {better}"
        )
    if target.stem in recipe_names():
        raise DPipeError(
            f"{target}: recipe={target.stem} would still be the one of the package; use another "
            f"name, such as {target.with_stem(f'my_{target.stem}')}"
        )
    if target.exists() and not force:
        raise DPipeError(f"{target} is there already; use another name, or --force to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    text = (config_dir() / FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    target.write_text(text, encoding="utf-8")
    return target

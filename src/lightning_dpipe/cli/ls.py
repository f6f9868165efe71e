"""``dpipe ls [GROUP ...]``: recipes and config groups, each with the first words of its comment.

In: nothing, or names of groups. Out: a list on the console.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lightning_dpipe.cli.paths import config_dir

WIDTH = 92


def run(arguments: Sequence[str]) -> int:
    """Print the list; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dpipe ls", description=__doc__.split("\n")[0])
    parser.add_argument("group", nargs="*", help="only these, such as recipe or data")
    chosen: list[str] = parser.parse_args(arguments).group
    root = config_dir()
    groups = sorted({path.parent.name for path in root.glob("*/*.yaml")})
    groups.sort(key=lambda name: name != "recipe")
    unknown = [name for name in chosen if name not in groups]
    if unknown:
        print(
            f"dpipe: {unknown[0]!r} is no config group; there are {', '.join(groups)}",
            file=sys.stderr,
        )
        return 2
    for group in chosen or groups:
        print(f"{group}=")
        for path in sorted((root / group).glob("*.yaml")):
            print(f"  {path.stem:<20}{first_words(path)}")
    return 0


def first_words(path: Path) -> str:
    """First sentence of the comment that a config begins with, shortened; empty without one."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not words and (line.startswith("# @package") or line.strip() == "#"):
            continue
        if not line.startswith("# "):
            break
        words += line.removeprefix("# ").split()
    sentence = " ".join(words).partition(". ")[0].removesuffix(".")
    return textwrap.shorten(sentence, WIDTH, placeholder=" ...")

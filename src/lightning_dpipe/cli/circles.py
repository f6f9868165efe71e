"""``dpipe circles FOLDER``: write drawn circles, their outlines and captions as a data set.

In: arguments. Out: the folder; see `data.circles_folder`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.data.circles_folder import write_circles


def run(arguments: Sequence[str]) -> int:
    """Write and say how to use it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="dpipe circles", description="Write circles with captions and hints as a data set."
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--num", type=int, default=1000, help="pictures (1000)")
    parser.add_argument("--size", type=int, default=512, help="side in pixels (512)")
    parser.add_argument("--seed", type=int, default=0, help="which circles (0)")
    given = parser.parse_args(list(arguments))
    try:
        write_circles(given.folder, num=given.num, size=given.size, seed=given.seed)
    except DPipeError as error:
        print(f"dpipe: {error}", file=sys.stderr)
        return 2
    print(f"{given.num} images, hints and captions in {given.folder}")
    print(
        f"use it:  dpipe train recipe=controlnet data=image_folder data.path={given.folder} "
        "data.hint_column=conditioning_image"
    )
    return 0

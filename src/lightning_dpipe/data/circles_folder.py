"""Drawn circles as a folder: a ControlNet set in the usual layout, for trying data on disk.

In:     how many, how large, and a seed.
Out:    ``images/00000.png``, ``hints/00000.png`` and ``metadata.jsonl`` with the columns
        ``file_name``, ``conditioning_image`` and ``text``.
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.circles import TRAIN, draw_circle, drawn_circles


def write_circles(folder: Path, *, num: int, size: int, seed: int = 0) -> None:
    """Draw `num` circles of `size` x `size` pixels into a new folder; the index comes last.

    Raises:
        DataError: The folder holds something already, or a number is below 1.
    """
    if min(num, size) < 1:
        raise DataError(f"{num} pictures of {size} pixels; both must be at least 1")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} holds something already; give a folder that is new or empty")
    digits = max(5, len(str(num - 1)))
    rows = []
    for part in ("images", "hints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for i, circle in enumerate(drawn_circles(seed, TRAIN, num)):
        name = f"{i:0{digits}}.png"
        image, hint = draw_circle(circle, size)
        _save(folder / "images" / name, (image + 1) / 2)
        _save(folder / "hints" / name, hint)
        row = {
            "file_name": f"images/{name}",
            "conditioning_image": f"hints/{name}",
            "text": circle.caption,
        }
        rows.append(json.dumps(row) + "\n")
    (folder / "metadata.jsonl").write_text("".join(rows), encoding="utf-8")


def _save(path: Path, picture: Tensor) -> None:
    """`picture` is ``[3, size, size]`` in ``[0, 1]``."""
    pixels = (picture * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)

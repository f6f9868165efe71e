from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.sampling.grid import save_grid, to_picture


def colours(path: Path) -> set[tuple[int, ...]]:
    return {colour for _, colour in Image.open(path).convert("RGB").getcolors(1 << 24)}


def test_every_image_is_drawn_in_its_own_colour(tmp_path: Path) -> None:
    levels = torch.linspace(-1, 1, 15)
    row = torch.stack([levels, levels.flip(0), torch.zeros(15)], 1)[:, :, None, None]
    rows = {"real": row.expand(15, 3, 8, 8), "drawn": -row.expand(15, 3, 8, 8)}
    path = tmp_path / "deep" / "grid.png"
    save_grid(path, rows, [f"caption {i}" for i in range(15)], fold=6)
    drawn = colours(path)
    for images in rows.values():
        for image in images:
            assert to_picture(image).getpixel((0, 0)) in drawn


def test_the_fold_keeps_the_grid_narrow(tmp_path: Path) -> None:
    images = torch.zeros(24, 3, 4, 4)
    for fold in (24, 6):
        save_grid(tmp_path / f"{fold}.png", {"a": images}, ["x"] * 24, fold=fold)
    wide, narrow = (Image.open(tmp_path / f"{fold}.png").size for fold in (24, 6))
    assert narrow[0] < wide[0] / 3
    assert narrow[1] > wide[1] * 3


def test_pictures_clamp_and_grey_becomes_rgb() -> None:
    image = torch.tensor([-5.0, -1.0, 0.2, 1.0, 5.0]).view(1, 1, 5)
    picture = np.asarray(to_picture(image))
    assert picture.shape == (1, 5, 3)
    assert picture[0, :, 1].tolist() == [0, 0, 153, 255, 255]


def test_rows_and_captions_must_agree(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'a' has 2 images for 3 captions"):
        save_grid(tmp_path / "g.png", {"a": torch.zeros(2, 3, 4, 4)}, ["x"] * 3)
    with pytest.raises(DataError, match="0 rows"):
        save_grid(tmp_path / "g.png", {}, ["x"])

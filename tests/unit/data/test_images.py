"""Captioned folders and decoding: what is read is what a person sees, or a named error."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.images import decode_image, read_image_folder


def write_index(folder: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metadata.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder


def save(folder: Path, name: str, picture: Image.Image, **options: object) -> Path:
    path = folder / name
    picture.save(path, **options)
    return path


def test_lines_are_read_in_file_order_with_the_named_columns(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        save(tmp_path, name, Image.new("RGB", (2, 2)))
    write_index(
        tmp_path, {"file": "b.png", "caption": "zwei"}, "", {"file": "a.png", "caption": "één"}
    )
    images = read_image_folder(tmp_path, caption_column="caption", file_column="file")
    assert [(i.path.name, i.caption) for i in images] == [("b.png", "zwei"), ("a.png", "één")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "names no image"),
        (["{"], r"metadata.jsonl:1 is not JSON"),
        (["[]"], "keys found: none"),
        ([{"file_name": "a.png", "caption": "x"}], "'text'; keys found: caption, file_name"),
        ([{"file_name": "a.png", "text": 3}], "no text under 'text'"),
        ([{"file_name": "gone.png", "text": "x"}], r"gone.png, which does not exist"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_image_folder(write_index(tmp_path, *lines))


def test_a_missing_index_is_named_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one JSON line per image"):
        read_image_folder(tmp_path)


def test_pixels_are_scaled_to_minus_one_and_one(tmp_path: Path) -> None:
    path = save(tmp_path, "a.png", Image.new("RGB", (4, 4), (0, 255, 51)))
    decoded = decode_image(path, 4)
    assert decoded.shape == (3, 4, 4)
    torch.testing.assert_close(decoded[:, 0, 0], torch.tensor([-1.0, 1.0, -0.6]))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white_whatever_colour_hides_there(
    tmp_path: Path, mode: str
) -> None:
    if mode == "P":
        picture = Image.new("P", (4, 4), 0)
        picture.putpalette([255, 0, 0])
        path = save(tmp_path, "a.png", picture, transparency=0)
    else:
        fill = (255, 0, 0, 0) if mode == "RGBA" else (0, 0)
        path = save(tmp_path, "a.png", Image.new(mode, (4, 4), fill))
    assert (decode_image(path, 4) == 1.0).all()


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8), "black")
    picture.paste("white", (0, 0, 4, 8))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise to show: left becomes top
    decoded = decode_image(save(tmp_path, "a.png", picture, exif=exif), 8)
    assert (decoded[:, :3] == 1).all()
    assert (decoded[:, 5:] == -1).all()


def test_other_shapes_are_cropped_at_the_centre_not_squeezed(tmp_path: Path) -> None:
    picture = Image.new("RGB", (24, 8), "black")
    picture.paste("white", (8, 0, 16, 8))
    assert (decode_image(save(tmp_path, "a.png", picture), 8) == 1).all()


def test_more_than_eight_bits_are_refused_not_clipped(tmp_path: Path) -> None:
    deep = Image.fromarray(np.full((4, 4), 40000, dtype=np.uint16))
    with pytest.raises(DataError, match="more than 8 bits"):
        decode_image(save(tmp_path, "a.png", deep), 4)
    with pytest.raises(DataError, match="mode 'F'"):
        decode_image(save(tmp_path, "a.tiff", Image.new("F", (4, 4), 0.5)), 4)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    path = save(tmp_path, "a.jpg", noise)
    path.write_bytes(path.read_bytes()[:800])
    with pytest.raises(DataError, match=r"a.jpg cannot be decoded"):
        decode_image(path, 8)


def test_a_rectangle_is_cropped_to_its_aspect_ratio(tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20), "red")
    picture.paste("blue", (10, 0, 30, 20))  # the middle half, all that a square keeps
    path = save(tmp_path, "two.png", picture)
    wide, square = decode_image(path, (10, 20)), decode_image(path, 10)
    assert wide.shape == (3, 10, 20)
    assert torch.equal(square, decode_image(path, (10, 10)))
    assert bool((wide[0, :, :4] > 0.8).all())  # resampling rings a little
    assert bool((square[2] > 0.8).all())

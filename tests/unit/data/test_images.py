"""Decoding: what is read is what a person sees, or a named error."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.images import decode_image


def save(folder: Path, name: str, picture: Image.Image, **options: object) -> Path:
    path = folder / name
    picture.save(path, **options)
    return path


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


def test_sixteen_bit_grey_keeps_its_range(tmp_path: Path) -> None:
    deep = Image.fromarray(np.full((4, 4), 0x4000, dtype=np.uint16))
    decoded = decode_image(save(tmp_path, "a.png", deep), 4)
    torch.testing.assert_close(decoded, torch.full((3, 4, 4), 0x40 / 127.5 - 1))


def test_values_without_a_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mode 'F', whose values have no agreed range"):
        decode_image(save(tmp_path, "a.tiff", Image.new("F", (4, 4), 0.5)), 4)


def test_cmyk_is_shown_as_a_person_sees_it(tmp_path: Path) -> None:
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    decoded = decode_image(save(tmp_path, "a.jpg", red, quality=100), 8)
    assert decoded[0].mean() > 0.8
    assert decoded[1:].mean() < -0.8


def test_the_first_picture_of_an_animation_counts(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (4, 4), "white"), Image.new("RGB", (4, 4), "black")
    path = save(tmp_path, "a.gif", first, save_all=True, append_images=[second])
    assert (decode_image(path, 4) == 1).all()


def test_a_page_that_calls_itself_an_image_is_named(tmp_path: Path) -> None:
    for name, content in (("a.jpg", b"<!DOCTYPE html><title>404</title>"), ("b.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} cannot be decoded"):
            decode_image(tmp_path / name, 4)


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

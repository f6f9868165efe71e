"""Every mode of picture against pixels worked out by hand; every cut against the whole file."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from lightning_dpipe.data.faults import FaultError, Kind
from lightning_dpipe.data.images import decode_image, probe_image

HIGH, WIDE = 3, 5
BYTES = arrays(np.uint8, (HIGH, WIDE, 4))


def on_white(colour: Any, alpha: Any) -> Any:
    return colour * (alpha / 255) + 255 * (1 - alpha / 255)


def grey(values: Any) -> Any:
    return np.repeat(values[..., None], 3, axis=2)


def palette(values: Any, **options: Any) -> tuple[Image.Image, dict[str, Any]]:
    indexed = Image.frombytes("P", (WIDE, HIGH), (values[..., 0] % 16).tobytes())
    indexed.putpalette([c for i in range(16) for c in (i * 16, 255 - i * 16, i)])
    return indexed, options


def palette_colours(values: Any) -> Any:
    index = (values[..., 0] % 16).astype(float)
    return np.stack([index * 16, 255 - index * 16, index], axis=2)


def attempt(read: Callable[[], Any]) -> Any:
    """What `read` returns, or the fault that it names; any other exception fails the test."""
    try:
        return read()
    except FaultError as fault:
        return fault


Case = Callable[[Any], tuple[Image.Image, dict[str, Any], Any]]


def opaque_palette(v: Any) -> tuple[Image.Image, dict[str, Any], Any]:
    picture, options = palette(v)
    return picture, options, palette_colours(v)


def clear_palette(v: Any) -> tuple[Image.Image, dict[str, Any], Any]:
    """Palette with an alpha for each colour: index i is i * 17 of 255 opaque."""
    picture, options = palette(v, transparency=bytes(i * 17 for i in range(16)))
    return picture, options, on_white(palette_colours(v), (v[..., :1] % 16) * 17.0)


def inks(v: Any) -> Any:
    """Ink on ink, as files without a colour profile are shown."""
    paper = 255 - v.astype(float)
    return paper[..., :3] * paper[..., 3:] / 255


CASES: dict[str, tuple[str, Case]] = {
    "1": ("png", lambda v: (
        Image.fromarray(np.where(v[..., 0] > 127, 255, 0).astype(np.uint8)).convert("1"), {},
        grey(np.where(v[..., 0] > 127, 255.0, 0.0)),
    )),
    "L": ("png", lambda v: (
        Image.fromarray(np.ascontiguousarray(v[..., 0])), {}, grey(v[..., 0].astype(float)),
    )),
    "LA": ("png", lambda v: (
        Image.fromarray(np.ascontiguousarray(v[..., :2])), {},
        on_white(grey(v[..., 0].astype(float)), v[..., 1:2].astype(float)),
    )),
    "P": ("png", opaque_palette),
    "P with alpha": ("png", clear_palette),
    "P of a gif": ("gif", opaque_palette),
    "RGB": ("png", lambda v: (
        Image.fromarray(np.ascontiguousarray(v[..., :3])), {}, v[..., :3].astype(float),
    )),
    "RGBA": ("png", lambda v: (
        Image.fromarray(v), {}, on_white(v[..., :3].astype(float), v[..., 3:].astype(float)),
    )),
    "RGBA of a webp": ("webp", lambda v: (
        Image.fromarray(v), {"lossless": True, "exact": True},
        on_white(v[..., :3].astype(float), v[..., 3:].astype(float)),
    )),
    "CMYK": ("tiff", lambda v: (Image.frombytes("CMYK", (WIDE, HIGH), v.tobytes()), {}, inks(v))),
    "I;16": ("png", lambda v: (
        Image.fromarray(v[..., 0].astype(np.uint16) * 256 + v[..., 1]), {},
        grey(v[..., 0].astype(float)),
    )),
    "I;16 of a tiff": ("tiff", lambda v: (
        Image.fromarray(v[..., 0].astype(np.uint16) * 256 + v[..., 1]), {},
        grey(v[..., 0].astype(float)),
    )),
}  # fmt: skip


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.parametrize("name", CASES)
@given(values=BYTES)
def test_pixels_are_the_ones_a_person_sees(tmp_path: Path, name: str, values: Any) -> None:
    ending, case = CASES[name]
    picture, options, expected = case(values)
    path = tmp_path / f"a.{ending}"
    picture.save(path, **options)
    shown = (decode_image(path, (HIGH, WIDE)).permute(1, 2, 0) + 1) * 127.5
    # Compositing and inks round each step; everything else is exact up to a float's last bit.
    rounding = 1.5 if name in ("LA", "P with alpha", "RGBA", "RGBA of a webp", "CMYK") else 1e-4
    assert float((shown - torch.from_numpy(expected)).abs().max()) <= rounding
    found = probe_image(path, decode=True)
    assert (found.height, found.width) == (HIGH, WIDE)


def oriented(pixels: Any, orientation: int) -> Any:
    """What EXIF's numbers say, in numpy."""
    flipped = pixels[:, ::-1] if orientation in (2, 4, 5, 7) else pixels
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}[orientation]
    return np.rot90(flipped, turns)


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied(tmp_path: Path, ending: str, orientation: int) -> None:
    blocks = np.random.default_rng(0).integers(0, 2, (2, 3)).astype(np.uint8) * 255
    blocks[0, 0], blocks[0, 1], blocks[1, 0] = 255, 0, 0
    pixels = np.kron(blocks, np.ones((16, 16), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    Image.fromarray(pixels).convert("RGB").save(path, exif=exif)
    expected = oriented(pixels, orientation)
    shown = (decode_image(path, expected.shape)[0].numpy() + 1) * 127.5
    assert np.abs(shown - expected).max() < 40  # JPEG's
    for decode in (False, True):
        found = probe_image(path, decode=decode)
        assert (found.height, found.width) == expected.shape
        assert (Kind.TURNED in found.notes) == (orientation != 1)


def test_the_orientation_of_a_png_may_come_after_its_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 4), "red").save(path, exif=exif)
    data = path.read_bytes()
    at = data.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(data[at : at + 4], "big")
    tail = data.index(b"IEND") - 4
    path.write_bytes(data[:at] + data[end:tail] + data[at:end] + data[tail:])
    found = probe_image(path, decode=False)
    assert (found.height, found.width) == (8, 4)
    assert torch.equal(decode_image(path, (8, 4)), decode_image(path, 8)[:, :, :4])


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "gif", "bmp", "tiff"])
def test_a_file_cut_anywhere_is_named_or_whole_all_the_same(tmp_path: Path, ending: str) -> None:
    """Never other pixels: what is missing would be grey, black or noise."""
    picture = Image.effect_noise((40, 40), 90).convert("RGB")
    memory = io.BytesIO()
    picture.save(memory, format={"jpg": "jpeg", "tif": "tiff"}.get(ending, ending))
    data, path = memory.getvalue(), tmp_path / f"a.{ending}"
    path.write_bytes(data)
    whole = decode_image(path, 40)
    cuts = {0, 1, 7, len(data) - 1, *np.linspace(2, len(data) - 2, 40).astype(int).tolist()}
    refused = 0
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        made = attempt(lambda: decode_image(path, 40))
        if isinstance(made, FaultError):
            assert made.kind in (Kind.EMPTY_FILE, Kind.NOT_AN_IMAGE, Kind.DAMAGED)
            assert str(path) in str(made)
            refused += 1
        else:
            assert torch.equal(made, whole), f"cut to {cut} of {len(data)} bytes"
    assert refused >= len(cuts) // 2


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_noise_in_a_file_is_a_named_fault_or_a_picture(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """No other exception, whatever the bytes are: it would end training without a file name."""
    ending = data.draw(st.sampled_from(["jpeg", "png", "webp", "gif", "bmp", "tiff"]))
    memory = io.BytesIO()
    Image.linear_gradient("L").resize((16, 16)).convert("RGB").save(memory, format=ending)
    content = bytearray(memory.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / f"noise.{ending}"
    path.write_bytes(content)
    for read in (lambda: decode_image(path, 8), lambda: probe_image(path, decode=False)):
        made = attempt(read)
        assert not isinstance(made, FaultError) or str(path) in str(made)


@pytest.mark.parametrize(
    ("name", "content", "kind", "words"),
    [
        ("a.jpg", b"", Kind.EMPTY_FILE, "it is empty"),
        ("a.jpg", b"\n<!DOCTYPE html><title>404</title>", Kind.NOT_AN_IMAGE, "a web page"),
        ("a.png", b'{"error": 404}', Kind.NOT_AN_IMAGE, "no image format"),
    ],
)
def test_what_is_no_image_is_told_apart(
    tmp_path: Path, name: str, content: bytes, kind: Kind, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    for decode in (False, True):
        with pytest.raises(FaultError, match=words) as caught:
            probe_image(tmp_path / name, decode=decode)
        assert caught.value.kind is kind
    with pytest.raises(FaultError, match="does not exist") as caught:
        decode_image(tmp_path / "gone.png", 4)
    assert caught.value.kind is Kind.ABSENT


@pytest.mark.parametrize("mode", ["F", "I"])
def test_numbers_of_unknown_range_are_refused_from_the_header(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (4, 4)).save(tmp_path / "a.tiff")
    for decode in (False, True):
        with pytest.raises(FaultError, match="no agreed range") as caught:
            probe_image(tmp_path / "a.tiff", decode=decode)
        assert caught.value.kind is Kind.NO_RANGE


def test_a_single_pixel_and_a_thread_are_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), (255, 0, 0)).save(tmp_path / "dot.png")
    assert decode_image(tmp_path / "dot.png", 8)[:, 3, 3].tolist() == [1, -1, -1]
    thread = Image.new("RGB", (20000, 10), "black")
    thread.paste("white", (9990, 0, 10010, 10))
    thread.save(tmp_path / "thread.png")
    assert bool((decode_image(tmp_path / "thread.png", 10) == 1).all())


@pytest.mark.parametrize("ending", ["webp", "gif", "png"])
def test_the_first_of_several_pictures_counts_and_is_noted(tmp_path: Path, ending: str) -> None:
    first, second = Image.new("RGB", (8, 8), "white"), Image.new("RGB", (8, 8), "black")
    path = tmp_path / f"a.{ending}"
    first.save(path, save_all=True, append_images=[second], duration=50)
    assert bool((decode_image(path, 8) == 1).all())
    assert Kind.ANIMATED in probe_image(path, decode=False).notes


def test_a_photographers_cmyk_jpeg_is_not_a_negative(tmp_path: Path) -> None:
    """Such files hold their inks inverted, and say so in an Adobe marker."""
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red.save(tmp_path / "a.jpg", quality=95)
    assert b"Adobe" in (tmp_path / "a.jpg").read_bytes()
    shown = decode_image(tmp_path / "a.jpg", 16).mean(dim=(1, 2))
    assert shown[0] > 0.9
    assert shown[1] < -0.9
    assert Kind.INKS in probe_image(tmp_path / "a.jpg", decode=False).notes

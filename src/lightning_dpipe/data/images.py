"""Image files.

In:     an image, as a path or a member of an archive.
Out:    float32 ``[3, height, width]`` in ``[-1, 1]``, or what it is without its pixels (`Probe`).

``Image.convert("RGB")`` alone damages files without a word: transparent pixels show their hidden
colour, rotations in EXIF are lost, 16-bit grey and float pictures come out black or white. Here
transparency is composited on white, EXIF is applied, 16-bit grey is scaled, and what has no known
range is refused. Of an animation the first picture counts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from lightning_dpipe.data.faults import FaultError, Kind
from lightning_dpipe.data.samples import Stored

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_EIGHT_BIT_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr")
_EXIF_ORIENTATION = 0x0112
_TIFF_WIDTH, _TIFF_HEIGHT = 0x0100, 0x0101
_TURNED = (5, 6, 7, 8)
_COLOUR_SIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What an image file holds, as it is shown: `height` and `width` are after its EXIF rotation.

    `notes` say what reading it changes. `colour` is how far its channels are apart on average, in
    [0, 1]: 0 for grey; None if the pixels were not looked at.
    """

    height: int
    width: int
    notes: tuple[Kind, ...] = ()
    colour: float | None = None


def decode_image(source: Stored, size: int | tuple[int, int]) -> Tensor:
    """Decode one image: crop to the centre, resize, scale; ``[3, height, width]``.

    `size` is (height, width), or the side of a square.

    Raises:
        FaultError: The file cannot be decoded, or the range of its values is not known.
    """
    with _opened(source) as opened:
        picture = _shown(source, opened)
    height, width = (size, size) if isinstance(size, int) else size
    fitted = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
    pixels = np.array(fitted, dtype=np.float32) / 127.5 - 1.0
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def probe_image(source: Stored, *, decode: bool) -> Probe:
    """Look at one image: at its header only, or with `decode` at all of it.

    Raises:
        FaultError: As `decode_image`; a header alone does not show that a file is cut short.
    """
    with _opened(source) as opened:
        width, height = _stored_size(opened)
        orientation = _orientation(opened)
        if orientation in _TURNED:
            width, height = height, width
        notes = _notes(opened, orientation)
        _check_range(source, opened)
        colour = _colour(_shown(source, opened)) if decode else None
    return Probe(height=height, width=width, notes=notes, colour=colour)


@contextmanager
def _opened(source: Stored) -> Iterator[Image.Image]:
    """The image file, open; errors of reading it inside the block are named."""
    try:
        with source.open("rb") as file, Image.open(file) as opened:
            yield opened
    except FaultError:
        raise
    except Exception as error:
        # On damaged bytes Pillow raises whatever its arithmetic runs into: OSError, SyntaxError,
        # ValueError, TypeError, KeyError, struct.error. Without a name the file is never found.
        raise _fault(source, error) from error


def _fault(source: Stored, error: Exception) -> FaultError:
    if isinstance(error, FileNotFoundError):
        return FaultError(Kind.ABSENT, f"{source} does not exist")
    if not isinstance(error, UnidentifiedImageError):
        return FaultError(Kind.DAMAGED, f"{source} cannot be decoded: {error}")
    with source.open("rb") as file:
        start = file.read(64).lstrip().lower()
    if not start:
        return FaultError(Kind.EMPTY_FILE, f"{source} cannot be decoded: it is empty")
    what = "no image format that is known"
    if start.startswith((b"<!doctype html", b"<html")):
        what = "a web page, such as a server sends instead of a missing file"
    return FaultError(Kind.NOT_AN_IMAGE, f"{source} cannot be decoded: its content is {what}")


def _shown(source: Stored, opened: Image.Image) -> Image.Image:
    """The picture as a person sees it, RGB of 8 bits."""
    _check_range(source, opened)
    deep = _is_deep(opened)
    picture = ImageOps.exif_transpose(opened)
    picture.load()
    if deep:
        high = np.asarray(picture).astype(np.uint16) >> 8
        picture = Image.fromarray(high.astype(np.uint8))
    return _on_white(picture)


def _check_range(source: Stored, opened: Image.Image) -> None:
    if not _is_deep(opened) and opened.mode not in _EIGHT_BIT_MODES:
        raise FaultError(
            Kind.NO_RANGE,
            f"{source} has mode {opened.mode!r}, whose values have no agreed range; convert it to "
            "8-bit RGB first, for it would come out black or white",
        )


def _is_deep(opened: Image.Image) -> bool:
    """16 bits of grey; older versions of Pillow open such a PNG as 32-bit integers."""
    return opened.mode in _SIXTEEN_BIT_MODES or (opened.mode == "I" and opened.format == "PNG")


def _stored_size(opened: Image.Image) -> tuple[int, int]:
    """Width and height before the EXIF rotation; of a TIFF Pillow tells those after it."""
    if opened.format == "TIFF":
        tags = opened.tag_v2  # type: ignore[attr-defined]
        return tags[_TIFF_WIDTH], tags[_TIFF_HEIGHT]
    return opened.size


def _orientation(opened: Image.Image) -> int | None:
    """EXIF's orientation. Pillow decodes all of a PNG to look for it: done only if it is there."""
    if opened.format == "PNG" and "exif" not in opened.info and not _has_exif_chunk(opened):
        return None
    return opened.getexif().get(_EXIF_ORIENTATION)


def _has_exif_chunk(opened: Image.Image) -> bool:
    """Whether a PNG has the chunk ``eXIf``; it may come after the pixels."""
    file: BinaryIO = opened.fp  # type: ignore[attr-defined]
    before, found = file.tell(), False
    file.seek(8)  # the signature; then chunks of length, name, content and checksum
    while not found and len(head := file.read(8)) == 8:
        found = head[4:] == b"eXIf"
        file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
    file.seek(before)
    return found


def _notes(opened: Image.Image, orientation: int | None) -> tuple[Kind, ...]:
    found = {
        Kind.DEEP: _is_deep(opened),
        Kind.INKS: opened.mode == "CMYK",
        Kind.TRANSPARENT: opened.has_transparency_data,
        Kind.TURNED: orientation not in (None, 0, 1),
        Kind.ANIMATED: getattr(opened, "n_frames", 1) > 1,
    }
    return tuple(kind for kind, holds in found.items() if holds)


def _colour(picture: Image.Image) -> float:
    """Mean distance of the largest channel from the smallest, of a picture made small."""
    small = np.asarray(picture.resize((_COLOUR_SIDE, _COLOUR_SIDE)), dtype=np.float32) / 255
    return float((small.max(axis=2) - small.min(axis=2)).mean())


def _on_white(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    rgba = picture.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    canvas.alpha_composite(rgba)
    return canvas.convert("RGB")

"""Image files and captioned folders.

In:     a folder in Hugging Face's imagefolder layout: images beside a ``metadata.jsonl``.
Out:    (path, caption) pairs, and images decoded to float32 ``[3, size, size]`` in ``[-1, 1]``.

``Image.convert("RGB")`` alone damages files without a word: transparent pixels show their hidden
colour, rotations in EXIF are lost, 16-bit grey and float pictures come out black or white. Here
transparency is composited on white, EXIF is applied, and the other two are refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lightning_dpipe.core.errors import DataError

_EIGHT_BIT_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedImage:
    """One line of ``metadata.jsonl``."""

    path: Path
    caption: str


def read_image_folder(
    folder: Path, *, caption_column: str = "text", file_column: str = "file_name"
) -> tuple[CaptionedImage, ...]:
    """Read ``folder/metadata.jsonl``, in file order.

    Args:
        folder: Holds the images and ``metadata.jsonl``.
        caption_column: Key of the caption.
        file_column: Key of the image path, relative to `folder`.

    Raises:
        DataError: The file is missing, empty or not JSON lines, a line lacks one of the keys (the
            message lists the ones found), or an image is missing.
    """
    index = folder / "metadata.jsonl"
    if not index.is_file():
        raise DataError(
            f"{index} does not exist; an image folder needs one JSON line per image, such as "
            f'{{"{file_column}": "0001.png", "{caption_column}": "a red square"}}'
        )
    images = []
    for number, line in enumerate(index.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{index}:{number} is not JSON: {error}") from error
        found = sorted(row) if isinstance(row, dict) else []
        for column in (file_column, caption_column):
            if column not in found or not isinstance(row[column], str):
                raise DataError(
                    f"{index}:{number} has no text under {column!r}; keys found: "
                    f"{', '.join(found) or 'none'}; name the right ones with file_column= and "
                    "caption_column="
                )
        path = folder / row[file_column]
        if not path.is_file():
            raise DataError(f"{index}:{number} names {path}, which does not exist")
        images.append(CaptionedImage(path=path, caption=row[caption_column]))
    if not images:
        raise DataError(f"{index} names no image; expected at least one line")
    return tuple(images)


def decode_image(path: Path, size: int | tuple[int, int]) -> Tensor:
    """Decode one image: crop to the centre, resize, scale; ``[3, height, width]``.

    `size` is (height, width), or the side of a square.

    Raises:
        DataError: The file cannot be decoded, or has more than 8 bits per channel.
    """
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
            picture.load()
    except (OSError, SyntaxError) as error:  # Pillow reports some broken PNGs as SyntaxError
        raise DataError(f"{path} cannot be decoded: {error}") from error
    if picture.mode not in _EIGHT_BIT_MODES:
        raise DataError(
            f"{path} has mode {picture.mode!r}, more than 8 bits per channel; "
            "convert it to 8-bit RGB first, for it would lose its range silently"
        )
    height, width = (size, size) if isinstance(size, int) else size
    fitted = ImageOps.fit(_on_white(picture), (width, height), Image.Resampling.LANCZOS)
    pixels = np.array(fitted, dtype=np.float32) / 127.5 - 1.0
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _on_white(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    rgba = picture.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    canvas.alpha_composite(rgba)
    return canvas.convert("RGB")

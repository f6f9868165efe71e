"""Image files.

In:     the path of an image. Out: float32 ``[3, height, width]`` in ``[-1, 1]``.

``Image.convert("RGB")`` alone damages files without a word: transparent pixels show their hidden
colour, rotations in EXIF are lost, 16-bit grey and float pictures come out black or white. Here
transparency is composited on white, EXIF is applied, 16-bit grey is scaled, and what has no known
range is refused. Of an animation the first picture counts.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lightning_dpipe.core.errors import DataError

_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_EIGHT_BIT_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "YCbCr")


def decode_image(path: Path, size: int | tuple[int, int]) -> Tensor:
    """Decode one image: crop to the centre, resize, scale; ``[3, height, width]``.

    `size` is (height, width), or the side of a square.

    Raises:
        DataError: The file cannot be decoded, or the range of its values is not known.
    """
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
            picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow reports some broken PNGs as SyntaxError, some broken TIFFs as ValueError.
        raise DataError(f"{path} cannot be decoded: {error}") from error
    if picture.mode in _SIXTEEN_BIT_MODES:
        picture = Image.fromarray((np.asarray(picture, dtype=np.uint16) >> 8).astype(np.uint8))
    if picture.mode not in _EIGHT_BIT_MODES:
        raise DataError(
            f"{path} has mode {picture.mode!r}, whose values have no agreed range; convert it to "
            "8-bit RGB first, for it would come out black or white"
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

"""Sample grids: one captioned column per prompt, one labelled row per way of drawing it.

In:     rows of images ``[columns, 3, height, width]`` in ``[-1, 1]``, a caption per column.
Out:    a PNG; long grids are folded, so that captions stay readable.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lightning_dpipe.core.errors import DataError

_MARGIN = 6
_LABEL_WIDTH = 76
_CAPTION_LINES = 3
_LINE_HEIGHT = 13
_FONT_SIZE = 11


def save_grid(
    path: Path,
    rows: Mapping[str, Tensor],
    captions: Sequence[str],
    *,
    fold: int = 12,
    cell: int = 96,
) -> None:
    """Draw the grid and write it as PNG; missing parent folders are made.

    Args:
        path: The file to write.
        rows: Images ``[columns, 3, height, width]`` in ``[-1, 1]`` by row label, drawn in order.
        captions: One per column.
        fold: Columns after which the grid continues below.
        cell: Side of one drawn image in pixels; small images keep their hard edges.

    Raises:
        DataError: There is nothing to draw, or a row's images and the captions differ in number.
    """
    if not rows or not captions:
        raise DataError(
            f"a grid of {len(rows)} rows and {len(captions)} captions; expected at least one each"
        )
    for label, images in rows.items():
        if len(images) != len(captions):
            raise DataError(
                f"row {label!r} has {len(images)} images for {len(captions)} captions; "
                "give one image per caption"
            )
    bands = [range(i, min(i + fold, len(captions))) for i in range(0, len(captions), fold)]
    pitch = cell + _MARGIN
    caption_height = _CAPTION_LINES * _LINE_HEIGHT + _MARGIN
    band_height = caption_height + len(rows) * pitch
    width = _LABEL_WIDTH + min(fold, len(captions)) * pitch + _MARGIN
    canvas = Image.new("RGB", (width, len(bands) * band_height + _MARGIN), "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=_FONT_SIZE)
    characters = max(1, int(cell / draw.textlength("n", font=font)))
    for band, columns in enumerate(bands):
        top = band * band_height + _MARGIN
        for place, column in enumerate(columns):
            left = _LABEL_WIDTH + place * pitch
            text = "\n".join(textwrap.wrap(captions[column], characters)[:_CAPTION_LINES])
            draw.multiline_text((left, top), text, fill="black", font=font, spacing=1)
            for row, images in enumerate(rows.values()):
                picture = to_picture(images[column]).resize((cell, cell), Image.Resampling.NEAREST)
                canvas.paste(picture, (left, top + caption_height + row * pitch))
        for row, label in enumerate(rows):
            middle = top + caption_height + row * pitch + cell // 2
            draw.text((_MARGIN, middle), label, fill="black", font=font, anchor="lm")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path, format="PNG")


def to_picture(image: Tensor) -> Image.Image:
    """Convert ``[3 or 1, height, width]`` in ``[-1, 1]`` to an 8-bit RGB picture."""
    pixels = image.detach().float().cpu().clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())

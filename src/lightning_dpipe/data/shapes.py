"""Coloured shapes with word captions: a data set that needs no file, package or download.

In:     nothing. Out: batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, and
        input_ids and attention_mask int64 ``[batch, 4]`` over a vocabulary of a dozen words.
For tests and for trying the package in a minute; it teaches a model next to nothing.
"""

from itertools import product

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dpipe.data.fields import FieldDataset

COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.1, 0.3, 0.9),
    "yellow": (0.95, 0.85, 0.1),
    "purple": (0.6, 0.2, 0.7),
    "black": (0.0, 0.0, 0.0),
}
SHAPES = ("circle", "square", "diamond", "cross")
WORDS = ("[pad]", "[start]", "[end]", *COLOURS, *SHAPES)
NUM_TOKENS = 4
_RADII = (0.4, 0.54, 0.68, 0.82)
_SHIFTS = (-0.15, 0.0, 0.15)


class ShapesDataModule(L.LightningDataModule):
    """24 captions; each is drawn in 36 sizes and places to train on, and once to validate.

    Args:
        batch_size: Samples per device and step.
        size: Side of the images in pixels.
        drop_last: Drop a short last training batch instead of training on it.
    """

    def __init__(self, *, batch_size: int = 8, size: int = 16, drop_last: bool = False) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.size = size
        self.drop_last = drop_last
        places = list(product(_RADII, _SHIFTS, _SHIFTS))
        self._train = self._fields(places)
        self._validation = self._fields([(0.6, 0.0, 0.0)])

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """Captions of the validation images, in order."""
        return tuple(f"{colour} {shape}" for colour, shape in product(COLOURS, SHAPES))

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled; Lightning puts in the distributed sampler."""
        return DataLoader(
            self._train, batch_size=self.batch_size, shuffle=True, drop_last=self.drop_last
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """One image per caption."""
        return DataLoader(self._validation, batch_size=self.batch_size)

    def _fields(self, places: list[tuple[float, float, float]]) -> FieldDataset:
        images, tokens = [], []
        for colour, shape in product(COLOURS, SHAPES):
            for radius, x, y in places:
                images.append(_draw(shape, COLOURS[colour], radius, x, y, self.size))
                tokens.append([WORDS.index(word) for word in ("[start]", colour, shape, "[end]")])
        ids = torch.tensor(tokens)
        return FieldDataset(
            {"image": torch.stack(images), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        )


def _draw(
    shape: str, colour: tuple[float, float, float], radius: float, x: float, y: float, size: int
) -> Tensor:
    """One shape on white, ``[3, size, size]``."""
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    dx, dy = (axis - x)[None, :].abs(), (axis - y)[:, None].abs()
    match shape:
        case "circle":
            inside = dx**2 + dy**2 < radius**2
        case "square":
            inside = torch.maximum(dx, dy) < radius
        case "diamond":
            inside = dx + dy < radius * 1.2
        case _:
            inside = (torch.minimum(dx, dy) < radius / 3) & (torch.maximum(dx, dy) < radius)
    ink = torch.tensor(colour)[:, None, None]
    return torch.where(inside, ink, torch.ones(3, 1, 1)).mul(2).sub(1)

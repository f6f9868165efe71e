"""Filled circles from outlines: a ControlNet set that needs no file, package or download.

In:     nothing. Out: batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, hint
        float32 ``[batch, 3, size, size]`` in ``[0, 1]`` (white outline on black), label int64
        ``[batch]`` (which colour the circle has), and input_ids and attention_mask int64 ``[batch,
        num_tokens]`` (input_ids_2, ... for more tokenizers).
Source: the idea is Fill50K's (Zhang et al., arXiv 2302.05543): the outline says where, the caption
        says in which colours. Drawn here, from a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.shapes import COLOURS
from lightning_dpipe.models.parts import Source, caption_fields, suffix, token_lengths

WORDS = ("[pad]", "[start]", "[end]", *COLOURS, "circle", "on")
TRAIN, VALIDATION = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """What one picture shows; centre and radius are shares of the side."""

    inside: str
    around: str
    x: float
    y: float
    radius: float

    @property
    def caption(self) -> str:
        """Such as ``red circle on blue``."""
        return f"{self.inside} circle on {self.around}"


class CirclesDataModule(L.LightningDataModule):
    """Circles of two different colours in random places, drawn when they are read.

    Args:
        batch_size: Samples per device and step.
        size: Side of the images in pixels.
        num_samples: Training pictures of an epoch.
        num_tokens: Length of a caption's tokens; a list is one length per tokenizer, None
            leaves captions out.
        tokenizer: Folder or hub id of a diffusers pipeline, for its tokenizers; None numbers the
            words of `WORDS`.
        seed: Which circles are drawn.
        num_workers: Loader processes.

    Raises:
        DataError: `num_tokens` is too short for a caption, or another number is below 1.
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        size: int = 64,
        num_samples: int = 2000,
        num_tokens: int | Sequence[int] | None = 77,
        tokenizer: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        lengths = () if num_tokens is None else token_lengths(num_tokens)
        if min(batch_size, size, num_samples) < 1 or min(lengths, default=6) < 6:
            raise DataError(
                f"batch_size={batch_size}, size={size}, num_samples={num_samples} must be at "
                f"least 1, num_tokens={num_tokens} at least 6"
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        source = None if tokenizer is None else Source(path=tokenizer)
        self._train = _Circles(seed, TRAIN, num_samples, size, lengths, source)
        self._validation = _Circles(seed, VALIDATION, 24, size, lengths, source)

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """Captions of the validation pictures, in order."""
        return tuple(circle.caption for circle in self._validation.circles)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled; Lightning puts in the distributed sampler."""
        return DataLoader(
            self._train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """24 pictures that are not in the training set."""
        return DataLoader(
            self._validation, batch_size=self.batch_size, num_workers=self.num_workers
        )


class _Circles(Dataset[dict[str, Tensor]]):
    def __init__(
        self,
        seed: int,
        split: int,
        count: int,
        size: int,
        lengths: Sequence[int],
        source: Source | None,
    ) -> None:
        self.circles = drawn_circles(seed, split, count)
        self._size = size
        captions = [circle.caption for circle in self.circles]
        if source is None:
            self._tokens = _numbered_fields(captions, lengths)
        else:
            self._tokens = caption_fields(source, captions, lengths)
        self._labels = torch.tensor([list(COLOURS).index(c.inside) for c in self.circles])

    def __len__(self) -> int:
        return len(self.circles)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, hint = draw_circle(self.circles[index], self._size)
        tokens = {name: ids[index] for name, ids in self._tokens.items()}
        return {"image": image, "hint": hint, "label": self._labels[index], **tokens}


def draw_circle(circle: Circle, size: int) -> tuple[Tensor, Tensor]:
    """Image in ``[-1, 1]`` and hint in ``[0, 1]``, each ``[3, size, size]``; edges are smooth."""
    axis = (torch.arange(size) + 0.5) / size
    distance = torch.hypot(axis[None, :] - circle.x, axis[:, None] - circle.y) - circle.radius
    inside = (0.5 - distance * size).clamp(0, 1)
    outline = (1.5 - (distance * size).abs()).clamp(0, 1)
    colours = [
        torch.tensor(COLOURS[name])[:, None, None] for name in (circle.inside, circle.around)
    ]
    image = torch.lerp(colours[1], colours[0], inside.expand(3, -1, -1))
    return image * 2 - 1, outline.expand(3, -1, -1).contiguous()


def drawn_circles(seed: int, split: int, count: int) -> list[Circle]:
    """The first `count` circles of a seed's split (`TRAIN` or `VALIDATION`)."""
    draw = np.random.default_rng((seed, split))
    return [_circle(draw) for _ in range(count)]


def _circle(draw: np.random.Generator) -> Circle:
    inside, around = draw.choice(list(COLOURS), size=2, replace=False)
    radius = draw.uniform(0.1, 0.35)
    x, y = draw.uniform(radius, 1 - radius, size=2)
    return Circle(inside=str(inside), around=str(around), x=x, y=y, radius=radius)


def _numbered_fields(captions: Sequence[str], lengths: Sequence[int]) -> dict[str, Tensor]:
    """What tokenizers would return, were each to number the words of `WORDS`."""
    fields = {}
    for place, length in enumerate(lengths, start=1):
        ids = torch.tensor([_numbered(caption, length) for caption in captions])
        fields[f"input_ids{suffix(place)}"] = ids
        fields[f"attention_mask{suffix(place)}"] = (ids != WORDS.index("[pad]")).long()
    return fields


def _numbered(caption: str, num_tokens: int) -> list[int]:
    ids = [WORDS.index(word) for word in ("[start]", *caption.split(), "[end]")]
    return ids + [WORDS.index("[pad]")] * (num_tokens - len(ids))

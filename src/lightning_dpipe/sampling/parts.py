"""A backbone as sampling runs it: the training layers, each split by how often its parts run.

In:     tensors by name, as in `models.spec`; a view of the rows that a unit is about.
Out:    per layer what runs once a call (the caption's projection), once a step (timestep
        embeddings) and once a unit (tokens); per value its shape; the attention sites.
One file a family (`dit`, `pixart`, `sd3`, `flux`) builds a `RowModel` from a `Backbone`, layer by
layer under the same names, so that a training plan's stages hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.models.spec import Layer


class Scope(str, Enum):
    """How often a value is made."""

    CALL = "call"
    STEP = "step"
    UNIT = "unit"


class Along(str, Enum):
    """What the second dimension of a value counts."""

    NOTHING = "nothing"
    TOKENS = "tokens"  # those of the unit's rows
    WORDS = "words"
    TEXT = "text"  # words in a step's first unit, none in the others


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The rows a unit is about, of an image of `grid` tokens.

    Attributes:
        first: First token row.
        last: Token row after the last one.
        grid: Token rows and columns of the whole image.
        words: Length of the text.
        text: Whether the text stream comes along.
    """

    first: int
    last: int
    grid: tuple[int, int]
    words: int
    text: bool

    @property
    def whole(self) -> bool:
        """Whether these are all rows."""
        return self.first == 0 and self.last == self.grid[0]

    @property
    def tokens(self) -> tuple[int, int]:
        """Token range ``[first, last)``."""
        return self.first * self.grid[1], self.last * self.grid[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole image."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A named tensor that a layer writes: ``[batch, *along, *widths]``."""

    scope: Scope
    along: Along
    widths: tuple[int, ...]

    def shape(self, batch: int, view: View) -> tuple[int, ...]:
        """Its shape in a unit."""
        first, last = view.tokens
        count = {
            Along.NOTHING: (),
            Along.TOKENS: (last - first,),
            Along.WORDS: (view.words,),
            Along.TEXT: (view.words if view.text else 0,),
        }[self.along]
        return (batch, *count, *self.widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``fn(view, *reads)`` returns one tensor, or a tuple in the order of `writes`."""

    fn: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class SiteKind(str, Enum):
    """What an attention module attends to; chooses the processor."""

    ROWS = "rows"  # the image's tokens
    CROSS = "cross"  # a caption that does not change
    JOINT = "joint"  # tokens, then words
    FLUX = "flux"  # words, then tokens, with rotary positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An attention module of a layer."""

    attention: Any
    kind: SiteKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayer:
    """A training layer's parts by scope, its modules and attention sites."""

    name: str
    parts: Mapping[Scope, Part]
    modules: tuple[nn.Module, ...] = ()
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowModel:
    """A backbone for sampling.

    Attributes:
        layers: One per training layer, under the same names.
        values: What layers write, except the output.
        noisy: Name of the noisy latent.
        timestep: Name of the timesteps.
        out: Name of the output.
        context: Name of the text encoding, None: the model reads none.
        patch: Latent pixels along the side of a token.
        dtype: Of weights and of all values.
        unconditional_first: The order of branches in a guided batch, as in the library's pipeline.
        timestep_scale: What the solver's timesteps are divided by.
        estimate: Name of the self-conditioning input.
        inputs: Names of the conditions, which all ranks are given.
        square: Whether the library draws square images only.
    """

    layers: tuple[RowLayer, ...]
    values: Mapping[str, Value]
    noisy: str
    timestep: str
    out: str
    patch: int
    dtype: torch.dtype
    context: str | None = None
    unconditional_first: bool = True
    timestep_scale: float = 1.0
    estimate: str | None = None
    inputs: tuple[str, ...] = ()
    square: bool = False

    def weights(self) -> tuple[int, ...]:
        """Shares of the work, for cutting stages: what is around the blocks hardly counts."""
        return tuple(100 if layer.sites else 1 for layer in self.layers)


def row_layer(
    layer: Layer, parts: Mapping[Scope, Part], kinds: Mapping[str, SiteKind] | None = None
) -> RowLayer:
    """A training layer split into `parts`; `kinds` are attention modules of its block, by name."""
    sites = []
    for name, kind in (kinds or {}).items():
        (block,) = layer.owns or ()
        if getattr(block, name) is not None:
            sites.append(Site(attention=getattr(block, name), kind=kind))
    return RowLayer(name=layer.name, parts=parts, modules=layer.modules(), sites=tuple(sites))


def unit_part(fn: Callable[..., Tensor | tuple[Tensor, ...]], reads: Any, writes: Any) -> Part:
    """A part that needs no view: the training layer's own callable."""
    return Part(fn=lambda view, *tensors: fn(*tensors), reads=tuple(reads), writes=tuple(writes))

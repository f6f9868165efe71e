"""A trained model that is its own target: each layer also runs on a second input, without gradient.

In:     the layers of one model over two sets of tensor names.
Out:    one list of layers. The second set's tensors need no gradient, so that cuts carry them
        forward only and the backward pass costs what it cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Layer


def with_target(layers: Sequence[Layer], target: Sequence[Layer]) -> tuple[Layer, ...]:
    """Join two lists of the same layers: those that train, and those that make the target.

    Args:
        layers: The model's layers.
        target: The same layers under other tensor names.

    Raises:
        SpecError: The lists are not of the same weights, or write a name in common.
    """
    if len(layers) != len(target):
        raise SpecError(f"{len(layers)} layers and {len(target)} of their target; expected as many")
    joined = []
    for own, other in zip(layers, target, strict=True):
        mine, theirs = ([id(p) for p in layer.parameters()] for layer in (own, other))
        if mine != theirs:
            raise SpecError(
                f"layer {own.name!r} and {other.name!r} of its target hold different weights; "
                "build both lists from one model"
            )
        common = set(own.writes) & set(other.writes)
        if common:
            raise SpecError(
                f"layer {own.name!r} and its target both write {sorted(common)}; give the target's "
                "tensors another prefix"
            )
        joined.append(
            Layer(
                name=own.name,
                module=_WithTarget(own, other),
                reads=(*own.reads, *other.reads),
                writes=(*own.writes, *other.writes),
                owns=own.owns if own.owns is not None else own.modules()[:1],
            )
        )
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class _WithTarget:
    own: Layer
    other: Layer

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        count = len(self.own.reads)
        # With gradient first: autocast keeps its copies of weights, and one made without gradient
        # would train nothing.
        made = _tuple(self.own.module(*tensors[:count]))
        with torch.no_grad():
            target = _tuple(self.other.module(*tensors[count:]))
        return (*made, *target)


def _tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)

"""Which layers do the same work: a transformer's blocks differ in their weights' values only.

In:     any callable, such as a layer's. Out: a key; equal keys mean equal code, options and shapes.
What is not understood counts by identity, so that two things are alike only if that is known.
"""

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_VALUES = (bool, int, float, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
_PLACES = frozenset({"layer_idx"})
"""Attributes that number a block for caches of decoders, which no layer here has."""


class _Plain:
    """An object that is nothing but its attributes."""


def likeness(thing: Any) -> Hashable:
    """Key of a callable, module, tensor or option."""
    return _Likeness().of(thing)


class _Likeness:
    """One key; an object that is met again counts as the place where it was met first."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._met: list[Any] = []  # alive, so that no other object gets its id

    def of(self, thing: Any) -> Hashable:
        if isinstance(thing, _VALUES):
            return (type(thing), thing)
        if id(thing) in self._places:
            return ("again", self._places[id(thing)])
        self._places[id(thing)] = len(self._places)
        self._met.append(thing)
        if isinstance(thing, Tensor):
            shape, stride = tuple(thing.shape), thing.stride()
            return (type(thing), shape, stride, thing.dtype, thing.device, thing.requires_grad)
        if isinstance(thing, tuple | list):
            return (type(thing), *map(self.of, thing))
        if isinstance(thing, set | frozenset):
            return (type(thing), frozenset(map(self.of, thing)))
        if isinstance(thing, Mapping):
            return self._items(thing, thing)
        if isinstance(thing, MethodType):
            return (thing.__func__, self.of(thing.__self__))
        if isinstance(thing, nn.Module):
            return self._items(thing, vars(thing))
        if is_dataclass(thing) and not isinstance(thing, type):
            return self._items(thing, {f.name: getattr(thing, f.name) for f in fields(thing)})
        if type(thing).__basicsize__ == _Plain.__basicsize__ and hasattr(thing, "__dict__"):
            return self._items(thing, vars(thing))
        return ("itself", id(thing))

    def _items(self, thing: Any, named: Mapping[Any, Any]) -> Hashable:
        pairs = ((self.of(k), self.of(v)) for k, v in named.items() if k not in _PLACES)
        return (type(thing), *pairs)

"""A digest of what a frozen layer computes: its weights, its settings, its code.

In:     the layer's callable and modules.
Out:    a digest that is the same in every process with the same model and versions, and another one
        after any change that could change what the layer writes.

The walk goes through modules, closures, methods, dataclasses and containers. It includes the source
files of the classes it meets, so that an edited ``forward`` counts. Where it sees too much, a kept
encoding is made again for nothing; so it sees rather too much.
"""

import functools
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What every module has from torch: hooks, the training flag. And what says where it is from.
_TORCH = frozenset(vars(nn.Module()))
_ORIGIN = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version", "transformers_version")
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements as they lie in memory, on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Fingerprint:
    """Digests of objects; one that many layers share (a whole encoder) is walked once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # holds the object: its id must stay its own
        self._files: dict[str, str] = {}

    def of(self, thing: Any) -> str:
        """The digest of an object."""
        if isinstance(thing, _PLAIN):
            return _digest(type(thing).__name__, repr(thing))
        if id(thing) not in self._known:
            self._known[id(thing)] = (thing, "itself")  # met again on the way: a cycle
            self._known[id(thing)] = (thing, _digest(*self._parts(thing)))
        return self._known[id(thing)][1]

    def _parts(self, thing: Any) -> Iterable[str | memoryview]:
        match thing:
            case Tensor():
                yield from (f"{thing.dtype} {tuple(thing.shape)}", tensor_bytes(thing))
            case np.ndarray():
                yield from (
                    f"{thing.dtype} {thing.shape}",
                    memoryview(np.ascontiguousarray(thing).tobytes()),
                )
            case Enum() | torch.dtype():
                yield repr(thing)
            case Mapping():
                yield "mapping"
                yield from sorted(
                    self.of(k) + self.of(v) for k, v in thing.items() if k not in _ORIGIN
                )
            case set() | frozenset():
                yield from ("set", *sorted(map(self.of, thing)))
            case list() | tuple():
                yield from (type(thing).__name__, *map(self.of, thing))
            case functools.partial():
                yield from ("partial", *map(self.of, (thing.func, thing.args, thing.keywords)))
            case types.MethodType():
                yield from ("method", self.of(thing.__func__), self.of(thing.__self__))
            case types.FunctionType():
                yield from self._function(thing)
            case types.CodeType():
                yield from (thing.co_name, thing.co_code.hex(), repr(thing.co_names))
                yield from map(self.of, thing.co_consts)
            case type():
                yield from self._type(thing)
            case nn.Module():
                yield from self._module(thing)
            case _:
                yield from self._object(thing)

    def _function(self, function: types.FunctionType) -> Iterable[str]:
        yield from (function.__qualname__, self.of(function.__code__))
        yield from (self.of(function.__defaults__), self.of(function.__kwdefaults__))
        wrapped = getattr(function, "__wrapped__", None)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        yield from map(self.of, (wrapped, cells))

    def _type(self, kind: type) -> Iterable[str]:
        yield f"{kind.__module__}.{kind.__qualname__}"
        try:
            path = inspect.getsourcefile(kind)
        except TypeError:  # built in, or written in C: the version stands for it
            path = None
        if path is None or not Path(path).is_file():
            return
        if path not in self._files:
            self._files[path] = _digest(memoryview(Path(path).read_bytes()))
        yield self._files[path]

    def _module(self, module: nn.Module) -> Iterable[str]:
        yield self.of(type(module))
        if any(base.__name__ == "LightningModule" for base in type(module).__mro__):
            return  # holds the Trainer and what is trained: no layer's own
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            yield from (name, self.of(value))
        for name, child in module._modules.items():
            yield from (name, self.of(child))
        for name, value in sorted(vars(module).items()):
            if name not in _TORCH and name not in _ORIGIN:
                yield from (name, self.of(value))

    def _object(self, thing: Any) -> Iterable[str]:
        yield self.of(type(thing))
        named = getattr(thing, "__dict__", {})
        slots = {s: getattr(thing, s) for s in getattr(thing, "__slots__", ()) if hasattr(thing, s)}
        for name, value in sorted({**named, **slots}.items()):
            if name not in _ORIGIN:
                yield from (name, self.of(value))
        if not named and not slots:
            yield re.sub(r"0x[0-9a-f]+", "", repr(thing))  # an address says nothing


def _digest(*parts: str | memoryview) -> str:
    found = blake2b(digest_size=20)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(f"{len(data)}:".encode())
        found.update(data)
    return found.hexdigest()

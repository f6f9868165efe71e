"""A log of tensor operations, from which any tensor's value can be computed later.

In:     operations on storages that are on meta, in the order they were called.
Out:    the bytes of a storage as they were before any of them. Nothing is computed twice within one
        question, and nothing that is overwritten later.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

OVERWRITES = {
    torch.ops.aten.uniform_.default,
    torch.ops.aten.normal_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.copy_.default,
}
"""Operations after which nothing of the tensor's earlier value is left."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A view of a deferred storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Op:
    """A logged operation. `outputs` are the storages it makes, in the order of its results."""

    index: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: torch.Generator | None
    state: Tensor | None
    outputs: tuple[int, ...]
    overwrites: bool


@dataclass(slots=True)
class Storage:
    """A storage on meta: where its values will be, and the operations that make or change them."""

    keeps: Tensor
    device: torch.device
    num_bytes: int
    ops: list[Op] = field(default_factory=list)


Known = dict[tuple[int, int], Tensor]
"""Storages as bytes, by number of operations so far."""


class OpLog:
    """Storages by key, each with its operations."""

    def __init__(self) -> None:
        self.storages: dict[int, Storage] = {}
        self.count = 0

    def __contains__(self, tensor: object) -> bool:
        """Whether the tensor is a deferred one."""
        return isinstance(tensor, Tensor) and on_meta(tensor) and key_of(tensor) in self.storages

    def value(self, tensor: Tensor) -> Tensor:
        """A deferred tensor's value now."""
        return self._compute(ref_of(tensor), self.count, {})

    def _compute(self, ref: Ref, until: int, known: Known) -> Tensor:
        """The value of a view before operation `until`. `known` are whole storages, computed."""
        storage = self.storages[ref.storage]
        ops = [op for op in storage.ops if op.index < until]
        version = (ref.storage, len(ops))
        if version not in known:
            first = next((i for i in reversed(range(len(ops))) if ops[i].overwrites), 0)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
            for op in ops[first:]:
                if ref.storage in op.outputs:
                    whole = self._made_by(op, ref.storage, known)
                    continue
                if not whole.numel():
                    whole.resize_(storage.num_bytes)
                self._change(op, ref.storage, whole, known)
            known[version] = whole if whole.numel() else whole.resize_(storage.num_bytes)
        return _view(known[version], ref)

    def _made_by(self, op: Op, storage: int, known: Known) -> Tensor:
        """A storage that an operation returned, as bytes."""
        args, kwargs = self._filled(op, None, known)
        results = [t for t in tree_iter(_run(op, args, kwargs)) if isinstance(t, Tensor)]
        made, like = results[op.outputs.index(storage)], self.storages[storage].keeps
        if made.stride() != like.stride() or made.dtype != like.dtype or not covers(made):
            whole = torch.empty_strided(
                like.size(), like.stride(), dtype=like.dtype, device=made.device
            )
            made = whole.copy_(made)
        flat = torch.empty(0, dtype=torch.uint8, device=made.device)
        return flat.set_(made.untyped_storage())

    def _change(self, op: Op, storage: int, whole: Tensor, known: Known) -> None:
        """Let an operation write to `whole`, the bytes of `storage` before it."""
        args, kwargs = self._filled(op, (storage, whole), known)
        _run(op, args, kwargs)

    def _filled(self, op: Op, own: tuple[int, Tensor] | None, known: Known) -> tuple[Any, Any]:
        """An operation's arguments with real tensors: views of `own`, or of other storages."""

        def fill(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            if own is not None and value.storage == own[0]:
                return _view(own[1], value)
            return self._compute(value, op.index, known)

        filled: tuple[Any, Any] = tree_map(
            fill, (op.args, op.kwargs), is_leaf=lambda x: isinstance(x, Ref)
        )
        return filled


def _run(op: Op, args: Any, kwargs: Any) -> Any:
    """Run an operation, a random one with the numbers it had in the build."""
    if op.state is None or op.generator is None:
        return op.call(*args, **kwargs)
    before = op.generator.get_state()
    op.generator.set_state(op.state)
    try:
        return op.call(*args, **kwargs)
    finally:
        op.generator.set_state(before)


def unseen() -> Any:
    """Inside, no dispatch mode sees what is called."""
    return torch.utils._python_dispatch._disable_current_modes()


def key_of(tensor: Tensor) -> int:
    """What tells storages apart, while both live."""
    return int(tensor.untyped_storage()._cdata)


def on_meta(tensor: Tensor) -> bool:
    """Whether there is no memory behind it."""
    return tensor.device.type == "meta"


def covers(tensor: Tensor) -> bool:
    """Whether the tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _view(whole: Tensor, ref: Ref) -> Tensor:
    typed = torch.empty(0, dtype=ref.dtype, device=whole.device)
    typed.set_(whole.untyped_storage(), ref.offset, ref.size, ref.stride)
    return typed


def generator_of(kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    """The generator that a random operation draws from."""
    given = kwargs.get("generator")
    if given is not None:
        chosen: torch.Generator = given
        return chosen
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        on_gpu: torch.Generator = torch.cuda.default_generators[index]
        return on_gpu
    return torch.default_generator


def ref_of(tensor: Tensor) -> Ref:
    """The tensor as a view of its storage."""
    return Ref(
        key_of(tensor),
        tuple(tensor.size()),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )

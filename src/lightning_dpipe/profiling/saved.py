"""Bytes that a layer keeps from its forward for its backward.

In:     a forward that runs inside `SavedBytes.counting`.
Out:    bytes of the distinct storages that autograd kept.
Weights are not counted: they are there anyway. A value that two layers keep (the output of one is
the input of the next) is counted once over a chain of layers: for the first that keeps it.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedBytes:
    """Counts, layer by layer, along one chain of layers: `counting`, then `total`."""

    def __init__(self) -> None:
        self._counted: set[int] = set()  # values that some layer has kept
        self._storages: dict[int, int] = {}
        self._weights: tuple[Tensor, ...] = ()
        self._weight_storages: frozenset[int] = frozenset()

    @contextmanager
    def counting(self, weights: Iterable[Tensor]) -> Iterator[None]:
        """Around the forward of the next layer, whose parameters and buffers are `weights`."""
        self._storages = {}
        self._weights = tuple(weights)
        self._weight_storages = frozenset(map(_storage, self._weights))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def total(self, values: Mapping[int, Tensor], outside: Iterable[int]) -> int:
        """Bytes of the layer that just ran.

        Args:
            values: What the layer read and wrote.
            outside: Values that are not the chain's own (encodings): they are there anyway.
        """
        left = dict(self._storages)
        for value in outside:
            left.pop(_storage(values[value]), None)
        for value, tensor in values.items():
            storage = _storage(tensor)
            if storage in left:
                if value in self._counted:
                    del left[storage]
                self._counted.add(value)
        return sum(left.values())

    def kept(self, value: int) -> bool:
        """Whether some layer has kept `value`."""
        return value in self._counted

    def keep(self, values: Iterable[int]) -> None:
        """Note values that a layer keeps which did not run, for it is like one that did."""
        self._counted.update(values)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._weight_storages and not self._is_weight(tensor):
            self._storages[storage] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # returning an output itself would make a reference cycle

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a weight in another guise: autocast's copy of it, or that transposed."""
        node = tensor.grad_fn
        while node is not None and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
            if node is not None and hasattr(node, "variable"):
                return any(node.variable is weight for weight in self._weights)
        return False


def _storage(tensor: Tensor) -> int:
    """Identity of a storage; fake tensors have one too, but no address of data."""
    return int(tensor.untyped_storage()._cdata)

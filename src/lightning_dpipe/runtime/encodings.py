"""The values of one batch, by device whose local batch the samples are from.

They are this rank's own rows, rows that other devices deliver, and rows of others encoded here.
Two banks alternate: while the step reads one, the next batch's rows are written into the other.
Receive buffers and partial outputs are kept from step to step, as large as any batch needed them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.program import Message
from lightning_dpipe.runtime.pool import reshaped
from lightning_dpipe.runtime.transport import Handle, torch_dtype


class Encodings:
    """One bank. Tensors are ``[local batch of the device, *value shape]``."""

    def __init__(self, graph: ModelGraph, own: int, device: torch.device) -> None:
        self._graph, self._own, self._device = graph, own, device
        self.position = own
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self._pending: dict[tuple[int, int], list[tuple[int, int, Handle, Message]]] = {}
        self._consumed: dict[tuple[int, int], int] = {}
        self.sizes: tuple[int, ...] = ()

    def begin(
        self,
        fields: Mapping[int, Tensor],
        sizes: tuple[int, ...],
        graph: ModelGraph | None = None,
    ) -> None:
        """Start a batch: forget the last one, take this rank's batch fields (by value).

        `graph` is that of the batch's shape class; by default as in the batch before.

        Raises:
            SpecError: A field's shape or dtype is not what the spec declares.
        """
        self._tensors.clear()
        self._pending.clear()
        self._consumed.clear()
        self.sizes = sizes
        self._graph = graph or self._graph
        rows = sizes[self._own]
        for value, tensor in fields.items():
            known = self._graph.values[value]
            wanted = (rows, *known.shape)
            if tuple(tensor.shape) != wanted or tensor.dtype is not torch_dtype(known.dtype):
                raise SpecError(
                    f"batch field {known.name!r} is {tensor.dtype} {tuple(tensor.shape)}; the spec "
                    f"declares {known.dtype} {wanted} (local batch of {rows}): fix the data or "
                    "PipelineSpec.inputs"
                )
            self._tensors[(value, self._own)] = tensor.contiguous()

    def read(self, value: int, device: int, first: int, last: int) -> Tensor:
        """Rows ``[first, last)`` of a device's batch. They must have arrived: see `waiting`."""
        return self._tensors[(value, device)][first:last]

    def write(self, value: int, device: int, first: int, last: int, tensor: Tensor) -> None:
        """Keep encoded rows: the whole batch as it is, a part copied into the full buffer."""
        if last - first == self.sizes[device]:
            self._tensors[(value, device)] = tensor.contiguous()
        else:
            self.landing(value, device, first, last).copy_(tensor)

    def landing(self, value: int, device: int, first: int, last: int) -> Tensor:
        """Where rows of a device's batch are received: a contiguous slice of its buffer."""
        key = (value, device)
        if key not in self._tensors:
            self._tensors[key] = self._buffer(value, device, self.sizes[device])
        return self._tensors[key][first:last]

    def expect(
        self, value: int, device: int, first: int, last: int, handle: Handle, message: Message
    ) -> None:
        """Remember a started receive, to be waited for when its rows are read."""
        self._pending.setdefault((value, device), []).append((first, last, handle, message))

    def waiting(
        self, value: int, device: int, first: int, last: int
    ) -> list[tuple[Handle, Message]]:
        """Take the handles of started receives that rows ``[first, last)`` depend on."""
        pending = self._pending.get((value, device))
        if not pending:
            return []
        due = [p for p in pending if p[0] < last and first < p[1]]
        self._pending[(value, device)] = [p for p in pending if p not in due]
        return [(handle, message) for _, _, handle, message in due]

    def consume(self, value: int, device: int, rows: int, total: int) -> None:
        """A frozen layer has read `rows` of an internal value; at `total` it is dropped."""
        key = (value, device)
        self._consumed[key] = self._consumed.get(key, 0) + rows
        if self._consumed[key] >= total:
            self._tensors.pop(key, None)
            self._buffers.pop(key, None)

    def on_host(self, value: int) -> bool:
        """Whether this rank has a batch field on the host."""
        return self._tensors[(value, self._own)].device.type == "cpu"

    def to_host(self, value: int, device: int) -> None:
        """Replace all received rows of a device's batch by a copy on the host."""
        self._tensors[(value, device)] = self._tensors[(value, device)].cpu()

    def _buffer(self, value: int, device: int, rows: int) -> Tensor:
        known = self._graph.values[value]
        num_bytes = rows * known.bytes_per_sample
        kept = self._buffers.get((value, device))
        if kept is None or kept.numel() < num_bytes:
            kept = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._buffers[(value, device)] = kept
        return reshaped(kept, (rows, *known.shape), known.dtype)

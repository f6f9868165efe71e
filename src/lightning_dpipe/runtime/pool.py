"""Raw storage that the programs of one rank take their buffers from.

A step's buffers hold nothing once it has ended, so all programs (shape classes, short batches,
variants) share one set of storages, each as large as the largest buffer put into it.
"""

import torch
from torch import Tensor

from lightning_dpipe.core.graph import DTYPE_BYTES
from lightning_dpipe.core.program import BufferSpec, Program
from lightning_dpipe.runtime.transport import torch_dtype


class BufferPool:
    """Buffers by program: views of shared storages, the largest in the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[Tensor] = []
        self._views: dict[int, tuple[Program, tuple[Tensor, ...]]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all storages."""
        return sum(storage.numel() for storage in self._storages)

    def of(self, program: Program) -> tuple[Tensor, ...]:
        """The program's buffers, as it numbers them. Valid until another program is asked for."""
        kept = self._views.get(id(program))
        if kept is None:
            kept = self._views[id(program)] = (program, self._place(program))
        return kept[1]

    def forget(self) -> None:
        """Drop what is kept by program, not the storages."""
        self._views.clear()

    def _place(self, program: Program) -> tuple[Tensor, ...]:
        sizes = [buffer_bytes(spec) for spec in program.buffers]
        order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        views: dict[int, Tensor] = {}
        for place, index in enumerate(order):
            views[index] = self._view(place, program.buffers[index])
        return tuple(views[i] for i in range(len(sizes)))

    def _view(self, place: int, spec: BufferSpec) -> Tensor:
        num_bytes = buffer_bytes(spec)
        if place == len(self._storages):
            self._storages.append(self._new(num_bytes))
        elif self._storages[place].numel() < num_bytes:
            self.forget()  # other programs' views keep the smaller storage alive
            self._storages[place] = self._new(num_bytes)
        return reshaped(self._storages[place], spec.shape, spec.dtype)

    def _new(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def buffer_bytes(spec: BufferSpec) -> int:
    """Size of a buffer."""
    count = DTYPE_BYTES[spec.dtype]
    for extent in spec.shape:
        count *= extent
    return count


def reshaped(storage: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """The first bytes of a uint8 storage as a tensor."""
    num_bytes = buffer_bytes(BufferSpec(shape=shape, dtype=dtype))
    return storage[:num_bytes].view(torch_dtype(dtype)).view(shape)

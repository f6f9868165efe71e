"""Images that a VAE has encoded already, kept as mean and log-variance.

In:     ``.safetensors`` with ``moments``, or with ``mean`` and ``logvar``, or ``.npy`` with the
        moments: floats ``[2 * channels, height / factor, width / factor]``, mean first, neither
        shifted nor scaled.
Out:    float32 moments of that shape. Latents are drawn from them in every step anew, as if the
        VAE had just encoded the image.
"""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from lightning_dpipe.data.faults import FaultError, Kind
from lightning_dpipe.data.images import Probe
from lightning_dpipe.data.samples import Stored

LATENTS = frozenset((".npy", ".safetensors"))
_MOST_HEADER_BYTES = 1 << 20
_READING = (OSError, EOFError, KeyError, TypeError, ValueError, SafetensorError)
"""What reading other bytes than expected raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentReader:
    """Reads moments of `channels` latent channels; `factor` is pixels per latent along a side.

    `sides` are the shape classes in pixels: latents cannot be resized, so each is of one of them.
    """

    channels: int
    factor: int
    sides: Mapping[str, tuple[int, int]]

    def probe(self, source: Stored, *, decode: bool) -> Probe:
        """Shape in pixels, from the header; with `decode` the numbers are read too.

        Raises:
            FaultError: These are no moments of any class' shape, or the file is damaged.
        """
        shape = self._shape(source)
        height, width = (side * self.factor for side in shape[1:])
        if decode:
            self.decode(source, (height, width))
        return Probe(height=height, width=width)

    def decode(self, source: Stored, sides: tuple[int, int]) -> Tensor:
        """Moments float32 ``[2 * channels, height, width]`` for `sides` in pixels.

        Raises:
            FaultError: They have another shape, numbers that are not finite, or are damaged.
        """
        try:
            moments = _load(source)
        except _READING as error:
            if isinstance(error, FaultError):
                raise
            raise FaultError(Kind.DAMAGED, f"{source} cannot be read: {error}") from error
        asked = (2 * self.channels, *(side // self.factor for side in sides))
        if tuple(moments.shape) != asked:
            raise FaultError(
                Kind.MOMENTS, f"{source} holds {list(moments.shape)}, expected {list(asked)}"
            )
        if not bool(moments.isfinite().all()):
            raise FaultError(Kind.DAMAGED, f"{source} holds numbers that are not finite")
        return moments

    def _shape(self, source: Stored) -> tuple[int, ...]:
        try:
            with source.open("rb") as file:
                shape = _header(source, file)
        except _READING as error:
            if isinstance(error, FaultError):
                raise
            kind = Kind.ABSENT if isinstance(error, FileNotFoundError) else Kind.DAMAGED
            raise FaultError(kind, f"{source} cannot be read: {error}") from error
        if len(shape) == 3 and shape[0] == self.channels:
            raise FaultError(
                Kind.MOMENTS,
                f"{source} holds {list(shape)}: latents that were drawn already, or means alone; "
                f"store mean and log-variance, {2 * self.channels} channels, so that every step "
                "draws anew",
            )
        known = {
            name: (2 * self.channels, high // self.factor, wide // self.factor)
            for name, (high, wide) in self.sides.items()
        }
        if shape not in known.values():
            shapes = ", ".join(f"{name} {list(s)}" for name, s in known.items())
            raise FaultError(
                Kind.MOMENTS, f"{source} holds {list(shape)}, which is no class' shape: {shapes}"
            )
        return shape


def _load(source: Stored) -> Tensor:
    data = source.read_bytes()
    if source.name.lower().endswith(".npy"):
        array = np.load(io.BytesIO(data), allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    tensors = load_safetensors(data)
    if "moments" in tensors:
        return tensors["moments"].float()
    if {"mean", "logvar"} <= set(tensors):
        return torch.cat([tensors["mean"].float(), tensors["logvar"].float()])
    raise _no_moments(source, tensors)


def _header(source: Stored, file: BinaryIO) -> tuple[int, ...]:
    """Shape of the moments; the file must be as long as its header says."""
    if source.name.lower().endswith(".npy"):
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
        _check_length(source, file, math.prod(shape) * dtype.itemsize)
        return tuple(shape)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= _MOST_HEADER_BYTES:
        raise FaultError(Kind.DAMAGED, f"{source} is no safetensors file, or is cut short")
    header = json.loads(file.read(length))
    tensors = {name: told for name, told in header.items() if name != "__metadata__"}
    _check_length(source, file, max(told["data_offsets"][1] for told in tensors.values()))
    if "moments" in tensors:
        return tuple(tensors["moments"]["shape"])
    if {"mean", "logvar"} <= set(tensors):
        channels, *sides = tensors["mean"]["shape"]
        if tensors["logvar"]["shape"] == [channels, *sides]:
            return (2 * channels, *sides)
    raise _no_moments(source, tensors)


def _check_length(source: Stored, file: BinaryIO, num_bytes: int) -> None:
    start = file.tell()
    found = file.seek(0, io.SEEK_END) - start
    if found < num_bytes:
        raise FaultError(
            Kind.DAMAGED,
            f"{source} is cut short: {found} bytes of numbers, its header says {num_bytes}",
        )


def _no_moments(source: Stored, tensors: Mapping[str, object]) -> FaultError:
    return FaultError(
        Kind.MOMENTS,
        f"{source} holds {', '.join(sorted(tensors)) or 'nothing'}; expected moments, or mean and "
        "logvar of one shape",
    )

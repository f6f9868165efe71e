"""Kept encodings as files: one sample an entry, named by a digest of all that it depends on.

In:     a key and the tensors of one sample.
Out:    the same tensors, bit for bit, or None: no entry, or one that cannot be trusted.

An entry appears under its name only when it is complete, so several ranks and several runs may
share a folder. A file that is cut short, changed or of another format is removed and made again.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_dpipe.strategy.cache.fingerprint import tensor_bytes

log = logging.getLogger(__name__)

_LENGTH_BYTES = 8  # safetensors: a little-endian length, a JSON header, the tensors


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/lightning-dpipe/encodings`` or the same under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lightning-dpipe" / "encodings"


def entry_key(mark: str, rows: Sequence[Tensor]) -> str:
    """Name of an entry: who encodes (`mark`), and each tensor's dtype, shape and elements."""
    found = blake2b(mark.encode(), digest_size=20)
    for row in rows:
        found.update(f"{row.dtype} {tuple(row.shape)}".encode())
        found.update(tensor_bytes(row))
    return found.hexdigest()


class Entries:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """Where an entry is, if it is."""
        return self.folder / key[:2] / f"{key}.safetensors"

    def read(self, key: str) -> dict[str, Tensor] | None:
        """An entry's tensors by name; None if there is none or it is broken."""
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            tensors = safetensors.torch.load(data)
            size = int.from_bytes(data[:_LENGTH_BYTES], "little")
            stored = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + size]).get("__metadata__", {})
        except (SafetensorError, ValueError, KeyError) as error:
            self._drop(path, str(error))
            return None
        if stored.get("sum") != _checksum(tensors):
            self._drop(path, "its checksum is another one")
            return None
        return tensors

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep an entry, unless there is one."""
        path = self.path(key)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {name: tensor.contiguous() for name, tensor in tensors.items()}
        data = safetensors.torch.save(own, {"sum": _checksum(own)})
        draft = path.with_name(f"{key}.{uuid4().hex}.part")
        try:
            draft.write_bytes(data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def _drop(self, path: Path, why: str) -> None:
        log.warning("the kept encoding %s cannot be used (%s): it is made again", path, why)
        path.unlink(missing_ok=True)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    found = blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        found.update(tensor_bytes(tensors[name]))
    return found.hexdigest()

"""A saved diffusers model inside a recording: each weight is read when, and where, it is needed.

In:     a way to find the model's files. Out: the model on meta, its weights known to the recording;
        None where the files are of another layout, so that the library has to load them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_dpipe.models.deferred import Recording

FindFile = Callable[[str], Path | None]
"""Local path of a file of the model, by name; None: it has no such file."""


def lazy_model(
    kind: Any, find: FindFile, variant: str | None, recording: Recording
) -> nn.Module | None:
    """Make the model of class `kind`, in evaluation mode, its weights in the usual precision."""
    config, where = find("config.json"), _weights(find, variant)
    if config is None or not where or not hasattr(kind, "from_config"):
        return None
    with torch.random.fork_rng():  # numbers that files replace shift no others
        model: Any = kind.from_config(json.loads(config.read_text(encoding="utf-8")))
    state = dict(model.state_dict())
    if set(state) != set(where) or any(_shape(where[n], n) != state[n].shape for n in state):
        return None
    for owner_name, owner in model.named_modules():
        prefix = f"{owner_name}." if owner_name else ""
        for name, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            read = _reader(where[prefix + name], prefix + name, parameter.dtype)
            owner._parameters[name] = nn.Parameter(recording.lazy(read, parameter))
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and prefix + name in where:
                owner._buffers[name] = _reader(where[prefix + name], prefix + name, buffer.dtype)()
    return model.eval()  # type: ignore[no-any-return]


def _weights(find: FindFile, variant: str | None) -> dict[str, Path]:
    """File of every tensor; empty if there are no safetensors."""
    mark = "" if variant is None else f".{variant}"
    index = find(f"diffusion_pytorch_model.safetensors.index{mark}.json")
    if index is None:
        file = find(f"diffusion_pytorch_model{mark}.safetensors")
        if file is None:
            return {}
        with safe_open(file, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), file)
    files = {}
    for name, shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
        file = find(shard)
        if file is None:
            return {}
        files[name] = file
    return files


def _shape(file: Path, name: str) -> torch.Size:
    with safe_open(file, framework="pt") as tensors:
        return torch.Size(tensors.get_slice(name).get_shape())


def _reader(file: Path, name: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(name)
        return found.to(dtype, copy=True)  # the file's pages can go

    return read

"""One file that holds a whole trained model, as communities share them, or one part of it.

In:     ``.safetensors`` or ``.ckpt`` with the original or diffusers' names, and the part's
        configuration: nothing is fetched to find out what it is.
Out:    the part with the file's weights.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.loaders.single_file_utils import (
    SingleFileComponentError,
    create_diffusers_clip_model_from_ldm,
    load_single_file_checkpoint,
)
from transformers import CLIPTextConfig, CLIPTextModel

from lightning_dpipe.core.errors import SpecError

SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")

_UNFIT = (OSError, ValueError, KeyError, RuntimeError, TypeError)
"""What the library raises for a file of another model."""


def is_file(path: str) -> bool:
    """Whether `path` names a file of weights, there or not."""
    return Path(path).suffix in SUFFIXES


def load_part(kind: Any, file: Path, part: str, config: Mapping[str, Any] | None) -> Any:
    """Make `part` of class `kind` with the file's weights.

    Raises:
        SpecError: There is no such file, no configuration, or they do not fit; the library's reason
            is quoted.
    """
    if not file.is_file():
        raise SpecError(f"{part} is to be read from {file}, but there is no such file")
    if config is None:
        raise SpecError(
            f"{part} is to be read from the single file {file}, which does not say what model it "
            f"holds; give the configuration of {part}, or a folder in diffusers' layout"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            if issubclass(kind, CLIPTextModel):
                return _text_encoder(file, folder, config)
            described = {"_class_name": kind.__name__, **config}
            Path(folder, "config.json").write_text(json.dumps(described), encoding="utf-8")
            return kind.from_single_file(str(file), config=folder, local_files_only=True)
    except (SingleFileComponentError, *_UNFIT) as error:
        raise SpecError(f"{part} cannot be read from {file}: {error}") from error


def _text_encoder(file: Path, folder: str, config: Mapping[str, Any]) -> CLIPTextModel:
    CLIPTextConfig(**config).save_pretrained(folder)
    made: CLIPTextModel = create_diffusers_clip_model_from_ldm(
        CLIPTextModel, load_single_file_checkpoint(str(file)), config=folder, local_files_only=True
    )
    return made.eval()

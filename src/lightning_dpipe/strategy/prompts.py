"""What images are asked for: lines of a file as batch fields, captions or labels.

In:     a text file, the module's batch fields, the datamodule whose tokenizer it was trained with.
Out:    prompts and fields.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.strategy.module import DiffusionModule

_DRAWN = ("image", "moments")  # made, not asked for


@runtime_checkable
class Tokenizes(Protocol):
    """A datamodule that turns any captions into the fields it trains with."""

    def tokenized(self, captions: Sequence[str]) -> Mapping[str, Tensor]:
        """Token fields int64 ``[captions, tokens]`` by name."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a UTF-8 text file that are not blank.

    Raises:
        DataError: It does not exist, is not UTF-8, or has none.
    """
    if not path.is_file():
        raise DataError(f"prompts={path} does not exist; give a text file, one prompt a line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})") from error
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise DataError(f"{path} has no prompt; write at least one, one a line")
    return prompts


def prompt_fields(
    module: DiffusionModule, data: Any, prompts: Sequence[str]
) -> Mapping[str, Tensor]:
    """Batch fields of prompts, as the module reads them in training.

    Raises:
        DataError: They are labels and no numbers of a class, the datamodule has no tokenizer, or
            the model is conditioned on more than prompts.
    """
    needed = [name for name in module.spec.inputs if name not in _DRAWN]
    if needed == ["label"]:
        return {"label": _labels(prompts, getattr(module, "null_class", None))}
    if not isinstance(data, Tokenizes):
        raise DataError(
            f"{type(data).__name__} has no tokenizer for prompts; give it tokenized(captions), or "
            "leave prompts= out to draw the held-out samples"
        )
    fields = data.tokenized(prompts)
    missing = [name for name in needed if name not in fields]
    if missing:
        raise DataError(
            f"{type(module).__name__} also reads {', '.join(missing)}, which a prompt does not "
            "give; leave prompts= out to draw the held-out samples"
        )
    return fields


def _labels(prompts: Sequence[str], num_classes: int | None) -> Tensor:
    for prompt in prompts:
        known = prompt.isdecimal() and (num_classes is None or int(prompt) < num_classes)
        if not known:
            most = "" if num_classes is None else f" from 0 to {num_classes - 1}"
            raise DataError(f"prompt {prompt!r} is no class; this model reads labels{most}")
    return torch.tensor([int(prompt) for prompt in prompts])

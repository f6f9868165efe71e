"""Where a model's parts come from: a folder or hub id in diffusers' layout, or a configuration.

In:     the part's class, a `Source`, or its constructor's arguments.
Out:    the module: with the source's weights, or with random ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from lightning_dpipe.core.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trained pipeline: `path` is a folder with ``unet/``, ``vae/``, ... or a hub id.

    `revision` and `variant` are the hub's: a commit, branch or tag, and ``fp16`` for such files.
    ``HF_HUB_OFFLINE`` is honoured, as everywhere.
    """

    path: str
    revision: str | None = None
    variant: str | None = None

    def load(self, kind: Any, subfolder: str) -> Any:
        """Make the part `subfolder` with its weights.

        Raises:
            SpecError: It is not there, or cannot be read; the library's reason is quoted.
        """
        folder = Path(self.path)
        if folder.is_dir() and not (folder / subfolder).is_dir():
            found = sorted(p.name for p in folder.iterdir() if p.is_dir())
            raise SpecError(
                f"{folder} has no folder {subfolder}/ (it has: {', '.join(found) or 'none'}); "
                "give a folder that a diffusers pipeline's save_pretrained() wrote"
            )
        try:
            return kind.from_pretrained(self.path, subfolder=subfolder, **self._options(kind))
        except (OSError, ValueError) as error:
            raise SpecError(f"{subfolder} of {self.path!r} cannot be loaded: {error}") from error

    def _options(self, kind: Any) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.variant is not None and issubclass(kind, nn.Module):
            options["variant"] = self.variant
        return options


def diffusers_part(
    kind: Any, config: Mapping[str, Any] | None, source: Source | None, subfolder: str
) -> Any:
    """A diffusers model of class `kind`; a source's own configuration goes before `config`.

    Raises:
        SpecError: Neither `config` nor `source` is given, or loading failed.
    """
    check_given(config, source, subfolder)
    if source is not None:
        return source.load(kind, subfolder)
    return kind(**(config or {}))


def suffix(place: int) -> str:
    """What the `place`-th (from 1) text encoder's part and fields end in: nothing, _2, _3, ..."""
    return "" if place == 1 else f"_{place}"


def token_lengths(num_tokens: int | Sequence[int]) -> tuple[int, ...]:
    """Caption length by tokenizer; one number is one tokenizer."""
    return (num_tokens,) if isinstance(num_tokens, int) else tuple(num_tokens)


def caption_fields(
    source: Source, captions: Sequence[str], num_tokens: int | Sequence[int]
) -> dict[str, Tensor]:
    """Captions as batch fields, cut and padded as diffusers' pipelines do.

    Args:
        source: Has a folder ``tokenizer``, and ``tokenizer_2``, ... for more lengths than one.
        captions: The texts.
        num_tokens: Length by tokenizer.

    Returns:
        ``input_ids`` and ``attention_mask`` (``input_ids_2``, ...), int64 ``[captions, length]``.

    Raises:
        SpecError: A tokenizer cannot be loaded.
    """
    fields = {}
    for place, length in enumerate(token_lengths(num_tokens), start=1):
        tokenizer = source.load(AutoTokenizer, f"tokenizer{suffix(place)}")
        made = tokenizer(
            list(captions),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_attention_mask=True,
        )
        fields[f"input_ids{suffix(place)}"] = torch.tensor(made["input_ids"])
        fields[f"attention_mask{suffix(place)}"] = torch.tensor(made["attention_mask"])
    return fields


def check_given(config: Mapping[str, Any] | None, source: Source | None, part: str) -> None:
    """Refuse a part that nothing describes.

    Raises:
        SpecError: Neither `config` nor `source` is given.
    """
    if config is None and source is None:
        raise SpecError(
            f"nothing says what {part} is; give its configuration for random weights, or "
            "pretrained= a folder or hub id"
        )

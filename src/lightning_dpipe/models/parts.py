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
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

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
    _check(config, source, subfolder)
    if source is not None:
        return source.load(kind, subfolder)
    return kind(**(config or {}))


def clip_text_part(config: Mapping[str, Any] | None, source: Source | None) -> CLIPTextModel:
    """CLIP's text encoder; arguments are those of ``CLIPTextConfig``.

    Raises:
        SpecError: As `diffusers_part`.
    """
    _check(config, source, "text_encoder")
    if source is not None:
        loaded: CLIPTextModel = source.load(CLIPTextModel, "text_encoder")
        return loaded
    return CLIPTextModel(CLIPTextConfig(**(config or {})))


def empty_caption(text: CLIPTextModel, source: Source | None, num_tokens: int) -> tuple[int, ...]:
    """Token ids of the caption "", padded: by the source's tokenizer, else from the configuration.

    Raises:
        SpecError: The tokenizer cannot be loaded.
    """
    if source is not None:
        return tuple(clip_tokens(source, [""], num_tokens)[0].tolist())
    config: Any = text.config
    padding = (config.pad_token_id,) * (num_tokens - 2)
    return (config.bos_token_id, config.eos_token_id, *padding)


def clip_tokens(source: Source, captions: Sequence[str], num_tokens: int) -> Tensor:
    """Token ids int64 ``[captions, num_tokens]``, cut and padded as Stable Diffusion does.

    Raises:
        SpecError: The tokenizer cannot be loaded.
    """
    tokenizer = source.load(CLIPTokenizer, "tokenizer")
    made = tokenizer(list(captions), padding="max_length", max_length=num_tokens, truncation=True)
    return torch.tensor(made["input_ids"])


def _check(config: Mapping[str, Any] | None, source: Source | None, part: str) -> None:
    if config is None and source is None:
        raise SpecError(
            f"nothing says what {part} is; give its configuration for random weights, or "
            "pretrained= a folder or hub id"
        )

"""Where a model's parts come from: a folder or hub id, one file, or a configuration.

In:     the part's class, a `Source`, or its constructor's arguments.
Out:    the module: with the source's weights, or with random ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from httpx import HTTPError
from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn
from transformers import AutoTokenizer

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.deferred import current_recording, unrecorded
from lightning_dpipe.models.lazy import lazy_model
from lightning_dpipe.models.single_file import is_file, load_part
from lightning_dpipe.models.turns import in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trained pipeline: a folder with ``unet/``, ``vae/``, ..., one file, or a hub id.

    `revision` and `variant` are the hub's: a commit, branch or tag, and ``fp16`` for such files.
    ``HF_HUB_OFFLINE`` is honoured, as everywhere. `parts` says which parts come from elsewhere:
    from the part's own folder (with its ``config.json``), one file, or hub id.
    """

    path: str | None = None
    revision: str | None = None
    variant: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)

    def has(self, part: str) -> bool:
        """Whether it says where `part` comes from."""
        return part in self.parts or (
            self.path is not None and part not in ("controlnet",)  # no pipeline folder has one
        )

    @property
    def has_tokenizer(self) -> bool:
        """A single file brings none."""
        return "tokenizer" in self.parts or (self.path is not None and not is_file(self.path))

    def load(self, kind: Any, subfolder: str, config: Mapping[str, Any] | None = None) -> Any:
        """Make the part `subfolder` with its weights; `config` is for a single file.

        Raises:
            SpecError: It is not there, or cannot be read; what was looked for is named, and the
                library's reason quoted.
        """
        own = self.parts.get(subfolder)
        path = self.path if own is None else own
        if path is None:
            raise SpecError(f"nothing says where {subfolder} comes from")
        with torch.random.fork_rng():  # what files replace shifts no numbers of other weights
            if is_file(path):
                with unrecorded():
                    return load_part(kind, Path(path), subfolder, config)
            place = _Place(path, "" if own is not None else subfolder, self.revision, self.variant)
            place.check()
            if place.is_local:
                return place.load(kind)
            return in_turn(f"{subfolder} of {place}", lambda: place.load(kind))


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder, here or on the hub, that one part is in."""

    path: str
    subfolder: str
    revision: str | None
    variant: str | None

    def __str__(self) -> str:
        found = repr(self.path)
        for name in ("revision", "variant"):
            value = getattr(self, name)
            found += "" if value is None else f" {name} {value!r}"
        return found

    @property
    def is_local(self) -> bool:
        return Path(self.path).is_dir()

    def check(self) -> None:
        """Refuse what is neither a folder nor a hub id."""
        folder = Path(self.path)
        if not folder.is_dir():
            if folder.is_absolute() or self.path.count("/") > 1 or self.path.startswith((".", "~")):
                raise SpecError(f"there is no folder {self.path!r}, and it is no hub id either")
        elif self.subfolder and not (folder / self.subfolder).is_dir():
            found = sorted(p.name for p in folder.iterdir() if p.is_dir())
            raise SpecError(
                f"{folder} has no folder {self.subfolder}/ (it has: {', '.join(found) or 'none'}); "
                "give a folder that a diffusers pipeline's save_pretrained() wrote"
            )

    def load(self, kind: Any) -> Any:
        recording = current_recording()
        try:
            if recording is not None and issubclass(kind, ModelMixin):
                later = lazy_model(kind, self._find, self.variant, recording)
                if later is not None:
                    return later
            with unrecorded():
                return kind.from_pretrained(
                    self.path, subfolder=self.subfolder, **self._options(kind)
                )
        except (OSError, ValueError, HTTPError) as error:
            offline = " (offline: HF_HUB_OFFLINE is set)" if HF_HUB_OFFLINE else ""
            what = self.subfolder or kind.__name__
            raise SpecError(f"{what} of {self} cannot be loaded{offline}: {error}") from error

    def _find(self, name: str) -> Path | None:
        """A file of the part, downloaded if need be."""
        if self.is_local:
            file = Path(self.path, self.subfolder, name)
            return file if file.is_file() else None
        try:
            found = hf_hub_download(
                self.path, name, subfolder=self.subfolder or None, revision=self.revision
            )
        except EntryNotFoundError:
            return None
        return Path(found)

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
    if source is not None and source.has(subfolder):
        return source.load(kind, subfolder, config)
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
    if config is None and (source is None or not source.has(part)):
        raise SpecError(
            f"nothing says what {part} is; give its configuration for random weights, or "
            "pretrained= a folder or hub id"
        )

"""What latent models with captions share: dropped, encoded, and empty captions.

In:     input_ids int64 ``[batch, tokens]`` (input_ids_2, ... and, for a masked encoder,
        attention_mask), and as `latent`.
Out:    the encodings that the backbone reads. Caption dropout and text encoders run ahead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoTokenizer

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.encoders import TextKind, TextPart
from lightning_dpipe.models.parts import Source, suffix, token_lengths
from lightning_dpipe.models.spec import Field, FrozenComponent
from lightning_dpipe.objective.dropout import caption_dropout
from lightning_dpipe.strategy.modules.latent import LatentModule

DROPPED = "caption_"
"""Prefix of the token fields after caption dropout."""


class CaptionedModule(LatentModule):
    """A latent model that reads encoded captions; `texts` are its encoders.

    Args:
        num_tokens: Length that captions are padded to; a list is one length per tokenizer.
        text: Configuration of the first encoder (``CLIPTextConfig`` or ``T5Config``); not read with
            ``pretrained``.
        text_2: Of the second one.
        text_3: Of the third one.
        text_dtype: Name of the dtype that the encoders are kept in (``bfloat16``, for training in
            mixed precision: half the memory); None: as they come.
        caption_dropout: Share of samples trained on the empty caption, for guidance.
        options: See `LatentModule`.
    """

    texts: ClassVar[tuple[TextPart, ...]] = (TextPart(kind=TextKind.CLIP, context="context"),)

    def __init__(
        self,
        *,
        num_tokens: int | Sequence[int] = 77,
        text: Mapping[str, Any] | None = None,
        text_2: Mapping[str, Any] | None = None,
        text_3: Mapping[str, Any] | None = None,
        text_dtype: str | None = None,
        caption_dropout: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_tokens = token_lengths(num_tokens)
        self.text_configs = {"text": text, "text_2": text_2, "text_3": text_3}
        self.text_dtype = None if text_dtype is None else _dtype(text_dtype)
        self.caption_dropout = caption_dropout

    def build_encoders(self) -> None:
        """Also the text encoders.

        Raises:
            SpecError: A part is neither configured nor found, or sizes do not fit.
        """
        super().build_encoders()
        source = self.config.source
        self.empty: dict[str, tuple[int, ...]] = {}
        for part in self.texts:
            encoder = part.build(self.text_configs[part.name], source)
            if self.text_dtype is not None:
                encoder = encoder.to(self.text_dtype)
            setattr(self, part.name, encoder.requires_grad_(False))
            self.empty |= part.empty_caption(encoder, source, self.num_tokens)

    def condition_inputs(self) -> dict[str, Field]:
        """Token ids, and masks of the encoders that take one."""
        return {n: Field(shape=(len(ids),), dtype=torch.int64) for n, ids in self.empty.items()}

    def conditioning(self) -> tuple[FrozenComponent, ...]:
        """Caption dropout, the same for all encoders of a sample; then the encoders."""
        drops, encoders = [], []
        for part in self.texts:
            drops.append(
                caption_dropout(
                    self.caption_dropout,
                    seed=self.seed,
                    empty={name: self.empty[name] for name in part.fields},
                    prefix=DROPPED,
                    name=f"caption{suffix(part.place)}",
                )
            )
            encoders.append(part.component(getattr(self, part.name), prefix=DROPPED))
        return (*drops, *encoders)

    def unconditional(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The empty caption for every sample."""
        return {
            name: torch.tensor(self.empty[name], device=ids.device).expand_as(ids)
            for name, ids in fields.items()
        }

    def pipeline_parts(self, source: Source) -> dict[str, Any]:
        """What a diffusers pipeline has beside its backbone."""
        parts: dict[str, Any] = {"vae": self.vae, "scheduler": self.saved_scheduler()}
        for part in self.texts:
            end = suffix(part.place)
            parts[f"text_encoder{end}"] = getattr(self, part.name)
            parts[f"tokenizer{end}"] = source.load(AutoTokenizer, f"tokenizer{end}")
        return parts


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SpecError(f"text_dtype={name!r} is no floating dtype of torch; use bfloat16 or null")
    return found

"""Text encoders by their place in a diffusers pipeline: how each is made, run and left empty.

In:     configurations, or a `Source` with ``text_encoder``, ``text_encoder_2``, ... and tokenizers.
Out:    modules, their frozen components, and the token ids of the caption "".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.parts import Source, caption_fields, check_given, suffix
from lightning_dpipe.models.spec import FrozenComponent
from lightning_dpipe.models.t5 import t5_encoder
from lightning_dpipe.models.text import clip_encoder


class TextKind(Enum):
    """Classes of encoders, each with that of its configuration."""

    CLIP = (CLIPTextModel, CLIPTextConfig)
    CLIP_PROJECTED = (CLIPTextModelWithProjection, CLIPTextConfig)
    T5 = (T5EncoderModel, T5Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """One text encoder of a family.

    Attributes:
        kind: Its class.
        place: Number among the pipeline's encoders, from 1.
        context: Name that its hidden states are written under; None: they are not used.
        pooled: Name of the end token's state (CLIP); None: it is not used.
        penultimate: CLIP's states are those that its last layer reads.
        masked: Padding is not attended to (T5).
    """

    kind: TextKind
    place: int = 1
    context: str | None = None
    pooled: str | None = None
    penultimate: bool = False
    masked: bool = False

    @property
    def name(self) -> str:
        """The module's attribute, and the component's name."""
        return f"text{suffix(self.place)}"

    @property
    def fields(self) -> tuple[str, ...]:
        """Batch fields that it reads: token ids, and the mask if it takes one."""
        names = ("input_ids", "attention_mask") if self.masked else ("input_ids",)
        return tuple(name + suffix(self.place) for name in names)

    def build(self, config: Mapping[str, Any] | None, source: Source | None) -> Any:
        """The encoder: from the source, else with the configuration's random weights.

        Raises:
            SpecError: Neither is given, or loading failed.
        """
        model, config_class = self.kind.value
        part = f"text_encoder{suffix(self.place)}"
        check_given(config, source, part)
        if source is not None and source.has(part):
            return source.load(model, part, config)
        return model._from_config(config_class(**(config or {})), attn_implementation="sdpa")

    def component(self, model: Any, *, prefix: str = "") -> FrozenComponent:
        """The encoder as frozen work; it reads its fields under `prefix`."""
        ids, *mask = (prefix + field for field in self.fields)
        if self.kind is TextKind.T5:
            if self.context is None:
                raise SpecError(f"{self.name} would write nothing; name its context")
            return t5_encoder(
                model,
                name=self.name,
                input_ids=ids,
                attention_mask=mask[0] if mask else None,
                out=self.context,
            )
        return clip_encoder(
            model,
            name=self.name,
            input_ids=ids,
            out=self.context,
            pooled=self.pooled,
            penultimate=self.penultimate,
        )

    def empty_caption(
        self, model: Any, source: Source | None, lengths: tuple[int, ...]
    ) -> dict[str, tuple[int, ...]]:
        """Its fields for the caption "": by the source's tokenizer, else from the configuration.

        Args:
            model: The encoder.
            source: Has the tokenizers.
            lengths: Caption length by tokenizer.

        Raises:
            SpecError: `lengths` has none for this encoder, or the tokenizer cannot be loaded.
        """
        if len(lengths) < self.place:
            raise SpecError(
                f"num_tokens has {len(lengths)} lengths, the model reads captions with at least "
                f"{self.place} tokenizers; give one length for each"
            )
        if source is not None and source.has_tokenizer:
            made = caption_fields(source, [""], lengths)
            return {name: tuple(made[name][0].tolist()) for name in self.fields}
        config, length = model.config, lengths[self.place - 1]
        start = () if self.kind is TextKind.T5 else (config.bos_token_id,)
        words = (*start, config.eos_token_id)
        padding = length - len(words)
        rows = ((*words, *(config.pad_token_id,) * padding), (1,) * len(words) + (0,) * padding)
        return dict(zip(self.fields, rows, strict=False))

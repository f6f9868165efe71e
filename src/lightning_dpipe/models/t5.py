"""T5's encoder as a frozen chain: embeddings | layer0 | layer1 | ... | output.

In:     token ids ``[batch, tokens]`` (and, for PixArt, a mask ``[batch, tokens]``, 1 keeps).
Out:    hidden states ``[batch, tokens, dim]``.
All layers add one bias to their scores, which depends on the distance of two tokens: ``[1, heads,
tokens, tokens]`` from weights of layer 0, for the XXL encoder at 512 tokens 67 MB. It is the same
for all samples, so it is no value between layers (those are kept per sample): the layers share one
that is made once a length. The mask is made anew in each layer, as for other encoders.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import T5EncoderModel
from transformers.masking_utils import create_bidirectional_mask

from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import FrozenComponent, Layer
from lightning_dpipe.models.text_layers import (
    encoder_key,
    narrow_encoder,
    refuse_encoder,
    text_chain,
)
from lightning_dpipe.models.verify import Trial, verify_once

_NARROW = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 3}


def t5_encoder(
    model: T5EncoderModel,
    *,
    name: str = "text",
    input_ids: str = "input_ids",
    attention_mask: str | None = None,
    out: str = "context",
    check: bool = True,
) -> FrozenComponent:
    """The encoder half of T5; writes its last hidden state.

    Args:
        model: The encoder.
        name: Name of the component.
        input_ids: Tokens, int64 ``[batch, tokens]``.
        attention_mask: Name of an int64 ``[batch, tokens]`` mask; None attends to padding too, as
            SD3 and Flux do.
        out: Name of the output ``[batch, tokens, d_model]``.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: An attention kernel other than sdpa or eager, or hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    refuse_encoder(model)
    masks = () if attention_mask is None else (attention_mask,)
    if check:
        verify_once(
            f"{encoder_key(model)} masked={bool(masks)}", lambda: _trial(model, bool(masks))
        )
    stack: Any = model.encoder
    bias = _Bias(stack.block[0].layer[0].SelfAttention)
    blocks = (
        (block, _Block(block, stack.config, bias, first=i == 0))
        for i, block in enumerate(stack.block)
    )
    layers = (
        *text_chain(stack.embed_tokens, blocks, input_ids, masks),
        Layer(name="output", module=stack.final_layer_norm, reads=("h",), writes=(out,)),
    )
    check_outside(layers[:-1], (input_ids, *masks, out))
    return FrozenComponent(name=name, layers=layers)


@dataclass(frozen=True, slots=True)
class _Bias:
    """The relative position bias by length, made anew when the weights were written to."""

    attention: Any
    known: dict[tuple[int, torch.device], tuple[tuple[int, int], Tensor]] = field(
        default_factory=dict
    )

    def of(self, h: Tensor, first: bool) -> Tensor:
        num_tokens = h.shape[1]
        weight = self.attention.relative_attention_bias.weight
        if isinstance(h, FakeTensor):  # a trace: nothing to keep, and layer 0 alone has the work
            if first:
                return self._made(num_tokens, h.device)
            shape = (1, self.attention.n_heads, num_tokens, num_tokens)
            return h.new_empty(shape, dtype=weight.dtype)
        key, state = (num_tokens, h.device), (weight.data_ptr(), weight._version)
        if key not in self.known or self.known[key][0] != state:
            self.known[key] = (state, self._made(num_tokens, h.device))
        return self.known[key][1]

    @torch.no_grad()
    def _made(self, num_tokens: int, device: torch.device) -> Tensor:
        made: Tensor = self.attention.compute_bias(num_tokens, num_tokens, device=device)
        return made


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module
    config: Any
    bias: _Bias
    first: bool

    def __call__(self, h: Tensor, *masks: Tensor) -> Tensor:
        mask = None
        if masks:
            mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=h,
                attention_mask=masks[0],
                allow_is_bidirectional_skip=False,
            )
        made: Tensor = self.block(h, mask, self.bias.of(h, self.first))[0]
        return made


def _trial(model: T5EncoderModel, masked: bool) -> Trial:
    """A narrow encoder of three layers and the same flags."""
    tiny = narrow_encoder(model, _NARROW)
    ids = torch.randint(1, tiny.config.vocab_size, (2, 5))
    inputs = {"input_ids": ids}
    if masked:
        inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    name = "attention_mask" if masked else None
    return Trial(
        model=tiny,
        layers=t5_encoder(tiny, attention_mask=name, check=False).layers,
        inputs=inputs,
        output="context",
        forward=lambda: tiny(**inputs).last_hidden_state,
    )

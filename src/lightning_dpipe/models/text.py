"""Text encoders of `transformers` as frozen chains: embeddings | layer0 | layer1 | ... | output.

In: token ids ``[batch, tokens]`` (and a mask ``[batch, tokens]``, 1 keeps). Out: hidden states
``[batch, tokens, dim]``. Each layer makes its attention mask from the 2D mask with the library's
own helper, so that no ``[tokens, tokens]`` mask is stored or sent. The helper must not look at the
mask's values (it would leave the mask out when nothing is padded): that would stop a GPU for the
host, and make a sample's numbers depend on which others are in its batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertModel, CLIPTextModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.hooks import refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import FrozenComponent, Layer
from lightning_dpipe.models.verify import Trial, verify_once

MASKS = ("sdpa", "eager")


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
    _refuse(model)
    if check:
        verify_once(_key(model), lambda: _bert_trial(model))
    blocks = _blocks(model.encoder.layer, (attention_mask,), lambda b: _BertLayer(b, model.config))
    if zero_masked:
        last = Layer(
            name="output", module=_ZeroMasked(), reads=("h", attention_mask), writes=(out,)
        )
    else:
        last = Layer(name="output", module=nn.Identity(), reads=("h",), writes=(out,))
    layers = (_embeddings(model, input_ids), *blocks, last)
    check_outside(layers[:-1], (input_ids, attention_mask, out))
    return FrozenComponent(name=name, layers=layers)


def clip_encoder(
    model: CLIPTextModel,
    *,
    name: str = "text",
    input_ids: str = "input_ids",
    out: str = "context",
    check: bool = True,
) -> FrozenComponent:
    """CLIP's text encoder as Stable Diffusion uses it: causal, padding not masked.

    Args:
        model: The encoder; its pooled output is not computed.
        name: Name of the component.
        input_ids: Tokens, int64 ``[batch, tokens]``, at most ``max_position_embeddings``.
        out: Name of the last hidden state ``[batch, tokens, dim]``.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: An attention kernel other than sdpa or eager, or hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    _refuse(model)
    if check:
        verify_once(_key(model), lambda: _clip_trial(model))
    layers = (
        _embeddings(model, input_ids),
        *_blocks(model.encoder.layers, (), lambda block: _ClipLayer(block, model.config)),
        Layer(name="output", module=model.final_layer_norm, reads=("h",), writes=(out,)),
    )
    check_outside(layers[:-1], (input_ids, out))
    return FrozenComponent(name=name, layers=layers)


def _embeddings(model: Any, input_ids: str) -> Layer:
    return Layer(name="embeddings", module=model.embeddings, reads=(input_ids,), writes=("h",))


def _blocks(
    blocks: Any, masks: tuple[str, ...], wrap: Callable[[nn.Module], Callable[..., Tensor]]
) -> Iterator[Layer]:
    for i, block in enumerate(blocks):
        yield Layer(
            name=f"layer{i}",
            module=wrap(block),
            reads=("h", *masks),
            writes=("h",),
            owns=(block,),
        )


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
class _ZeroMasked:
    def __call__(self, h: Tensor, attention_mask: Tensor) -> Tensor:
        return h * attention_mask[..., None].to(h.dtype)


def _refuse(model: Any) -> None:
    kernel = model.config._attn_implementation
    if kernel not in MASKS:
        raise UnsupportedError(
            f"{type(model).__name__} uses attention kernel {kernel!r}; its layers can be run one "
            f"by one with {' or '.join(MASKS)}: pass attn_implementation= when loading it"
        )
    refuse_hooks({"the text encoder": model, "its encoder": model.encoder})


def _key(model: Any) -> str:
    config = model.config
    return f"{type(model).__qualname__} {config._attn_implementation} {config.to_json_string()}"


def _tiny(model: Any) -> Any:
    """A narrow encoder of two layers and the same flags, in eval mode without gradients."""
    given = model.config.to_dict()
    narrow = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    config = type(model.config).from_dict({**given, **narrow})
    tiny = type(model)._from_config(
        config, attn_implementation=model.config._attn_implementation, dtype=torch.float32
    )
    return tiny.eval().requires_grad_(False)


def _bert_trial(model: BertModel) -> Trial:
    tiny = _tiny(model)
    ids = torch.randint(1, tiny.config.vocab_size, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return Trial(
        model=tiny,
        layers=bert_encoder(tiny, check=False).layers,
        inputs={"input_ids": ids, "attention_mask": mask},
        output="context",
        forward=lambda: tiny(ids, attention_mask=mask).last_hidden_state * mask[..., None],
    )


def _clip_trial(model: CLIPTextModel) -> Trial:
    tiny = _tiny(model)
    ids = torch.randint(1, tiny.config.vocab_size, (2, 7))
    return Trial(
        model=tiny,
        layers=clip_encoder(tiny, check=False).layers,
        inputs={"input_ids": ids},
        output="context",
        forward=lambda: tiny(ids).last_hidden_state,
    )

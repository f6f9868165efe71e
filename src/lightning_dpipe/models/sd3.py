"""`SD3Transformer2DModel` as a list of layers: embed | block0 | block1 | ... | head.

Tensors: ``h`` (image stream) is ``[batch, tokens, dim]``, ``c`` (text stream) ``[batch, words,
dim]``, ``temb`` (what all are modulated with) ``[batch, dim]``: all graph state. The last block
makes no text stream.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.hooks import refuse_checkpointing, refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.patches import check_sides, unpatchify
from lightning_dpipe.models.spec import Backbone, Layer
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once


def sd3_backbone(model: SD3Transformer2DModel, *, name: str = "sd3", **names: Any) -> Backbone:
    """The transformer as a backbone; `names` are those of `sd3_layers`."""
    return Backbone(name=name, layers=sd3_layers(model, **names), model=model)


def sd3_layers(
    model: SD3Transformer2DModel,
    *,
    sample: str = "sample",
    timestep: str = "timestep",
    context: str = "context",
    pooled: str = "pooled",
    self_cond: str | None = None,
    out: str = "out",
    check: bool = True,
) -> tuple[Layer, ...]:
    """Cut an SD3 or SD3.5 transformer at every joint block.

    Args:
        model: The model; widen its input first when `self_cond` is read.
        sample: Noisy latent ``[batch, channels, height, width]``, sides multiples of the patch.
        timestep: ``[batch]``, in units of the scheduler's training steps.
        context: Text encoding ``[batch, words, joint_attention_dim]``.
        pooled: Pooled text encoding ``[batch, pooled_projection_dim]``.
        self_cond: Previous estimate, appended to the sample's channels; None for none.
        out: Name of the output ``[batch, out_channels, height, width]``.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: Gradient checkpointing or an IP-adapter is on, or a module has hooks.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    _refuse(model)
    if check:
        verify_once(config_key(model), lambda: _trial(model))
    extra = () if self_cond is None else (self_cond,)
    layers = [
        Layer(
            name="embed",
            module=_Embed(model),
            reads=(sample, timestep, context, pooled, *extra),
            writes=("h", "c", "temb"),
            owns=(model.pos_embed, model.time_text_embed, model.context_embedder),
        )
    ]
    for i, block in enumerate(model.transformer_blocks):
        layers.append(
            Layer(
                name=f"block{i}",
                module=_Block(block),
                reads=("h", "c", "temb"),
                writes=("h",) if block.context_pre_only else ("h", "c"),
                owns=(block,),
            )
        )
    layers.append(
        Layer(
            name="head",
            module=_Head(model),
            reads=("h", "temb", sample),
            writes=(out,),
            owns=(model.norm_out, model.proj_out),
        )
    )
    check_outside(layers[:-1], (sample, timestep, context, pooled, *extra, out))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class _Embed:
    model: Any

    def __call__(
        self, sample: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, *self_cond: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        model = self.model
        check_sides(sample, model.config.patch_size, "SD3")
        h = model.pos_embed(torch.cat((sample, *self_cond), dim=1) if self_cond else sample)
        temb = model.time_text_embed(timestep, pooled)
        return h.contiguous(), model.context_embedder(context), temb


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module

    def __call__(self, h: Tensor, c: Tensor, temb: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        c, h = self.block(hidden_states=h, encoder_hidden_states=c, temb=temb)
        return h if c is None else (h, c)


@dataclass(frozen=True, slots=True)
class _Head:
    model: Any

    def __call__(self, h: Tensor, temb: Tensor, sample: Tensor) -> Tensor:
        model = self.model
        h = model.proj_out(model.norm_out(h, temb))
        return unpatchify(h, sample, patch=model.config.patch_size, channels=model.out_channels)


def _refuse(model: SD3Transformer2DModel) -> None:
    refuse_checkpointing(model)
    if getattr(model, "image_proj", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has an IP-adapter, whose inputs the layer list does not pass; "
            "unload it"
        )
    refuse_hooks({"the SD3 transformer": model})


def _trial(model: SD3Transformer2DModel) -> Trial:
    """A narrow model of three blocks and the same flags."""
    patch = model.config.patch_size
    given = arguments(model)
    narrow: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 3}
    narrow |= {"caption_projection_dim": 8, "joint_attention_dim": 6, "pooled_projection_dim": 5}
    # The last block has neither a text stream nor, in published models, a second attention.
    narrow["dual_attention_layers"] = (0,) if given["dual_attention_layers"] else ()
    narrow |= {"sample_size": 4 * patch, "pos_embed_max_size": 8}
    tiny: Any = type(model)(**{**given, **narrow})
    tiny.train()
    inputs = {
        "sample": torch.randn(2, tiny.config.in_channels, 4 * patch, 2 * patch),
        "timestep": torch.tensor([7.0, 123.5]),
        "context": torch.randn(2, 3, 6),
        "pooled": torch.randn(2, 5),
    }
    return Trial(
        model=tiny,
        layers=sd3_layers(tiny, check=False),
        inputs=inputs,
        output="out",
        forward=lambda: tiny(
            inputs["sample"],
            encoder_hidden_states=inputs["context"],
            pooled_projections=inputs["pooled"],
            timestep=inputs["timestep"],
            return_dict=False,
        )[0],
    )

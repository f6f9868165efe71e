"""ControlNet over a locked U-Net: filler work and a backbone.

The locked encoder and mid block do not see the ControlNet's output, so they are a frozen component
that runs ahead: it writes ``u_emb``, ``u_h`` and the skips ``u_s0, u_s1, ..``. The backbone is the
ControlNet's layers (trained: ``h``, ``emb``, ``s0, s1, ..``), then the locked decoder's (frozen,
with a gradient through). The zero convolutions are applied where the decoder pops a skip: the bytes
of a cut stay the same, the locked skips go to decoder stages only, and gradients sum in the order
of the library's own forward (applied early, they do not).
Source: Zhang et al., "Adding Conditional Control to Text-to-Image Diffusion Models", 2302.05543.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from diffusers.models.unets.unet_2d_blocks import (
    CrossAttnDownBlock2D,
    DownBlock2D,
    UNetMidBlock2DCrossAttn,
)
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.blocks import UNetWalk
from lightning_dpipe.models.hooks import refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import Backbone, FrozenComponent, Layer
from lightning_dpipe.models.unet import narrow_arguments, refuse_unsupported
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once

LOCKED = "u_"
"""Before the names of the locked U-Net's tensors."""


def controlnet_components(
    controlnet: ControlNetModel,
    unet: UNet2DConditionModel,
    *,
    sample: str = "sample",
    timestep: str = "timestep",
    context: str = "context",
    hint: str = "hint",
    out: str = "out",
    locked_name: str = "locked",
    name: str = "controlnet",
    check: bool = True,
) -> tuple[FrozenComponent, Backbone]:
    """Cut a ControlNet and its U-Net; locks the U-Net: none of its weights requires a gradient.

    Args:
        controlnet: The trained copy.
        unet: The locked model.
        sample: Noisy latent ``[batch, channels, height, width]``, from a frozen component or the
            batch, as the next two.
        timestep: ``[batch]``.
        context: Encoded conditioning ``[batch, tokens, dim]``.
        hint: Conditioning image ``[batch, channels, 8 x height, 8 x width]``.
        out: Name of the output, shaped as the sample.
        locked_name: Name of the frozen component (the U-Net's encoder and mid block).
        name: Name of the backbone.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: A model uses a feature of the library that has no layer here.
        SpecError: The models do not fit each other, the comparison failed, or a given name is one
            the layers use themselves.
    """
    _refuse_unsupported(controlnet, unet)
    if check:
        key = f"{config_key(controlnet)} over {config_key(unet)}"
        verify_once(key, lambda: _trial(controlnet, unet))
    unet.requires_grad_(False)
    locked = _LockedWalk(context, controlnet)
    encoder = [
        locked.time_embed(unet, sample, timestep),
        locked.conv_in(unet.conv_in, 2**unet.num_upsamplers, (sample,)),
    ]
    for i, block in enumerate(unet.down_blocks):
        encoder += locked.down(f"down{i}", block)
    if unet.mid_block is not None:
        encoder += locked.mid("mid", unet.mid_block)
    layers = _copy_layers(controlnet, sample, timestep, context, hint)
    locked.h = "h"  # from here on the decoder continues what the ControlNet wrote
    for i, block in enumerate(unet.up_blocks):
        layers += locked.up(f"unet.up{i}", block)
    layers.append(locked.out(unet, out, "unet.out"))
    check_outside([*encoder, *layers[:-1]], (sample, timestep, context, hint, out))
    return (
        FrozenComponent(name=locked_name, layers=tuple(encoder)),
        Backbone(name=name, layers=tuple(layers)),
    )


class ControlledUNet(nn.Module):
    """Both models with the library's own forwards, in one process: what the layers must equal."""

    def __init__(self, controlnet: ControlNetModel, unet: UNet2DConditionModel) -> None:
        super().__init__()
        self.controlnet, self.unet = controlnet, unet

    def forward(self, sample: Tensor, timestep: Tensor, context: Tensor, hint: Tensor) -> Tensor:
        """Predict; arguments and result as the tensors of `controlnet_components`."""
        down, mid = self.controlnet(sample, timestep, context, hint, return_dict=False)
        out: Tensor = self.unet(
            sample,
            timestep,
            context,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
            return_dict=False,
        )[0]
        return out


class _LockedWalk(UNetWalk):
    """The locked U-Net, whose decoder adds the ControlNet's skips to its own."""

    def __init__(self, context: str, controlnet: ControlNetModel) -> None:
        super().__init__(context, LOCKED)
        self._zero_convs = list(controlnet.controlnet_down_blocks)

    def up_resnet(self, name: str, resnet: nn.Module) -> Layer:
        skip = self.skips.pop()
        zero = self._zero_convs[len(self.skips)]
        return Layer(
            name=name,
            module=_ControlledResnet(resnet, zero),
            reads=(self.h, skip, skip.removeprefix(LOCKED), self.emb),
            writes=(self.h,),
            owns=(resnet, zero),
        )


def _copy_layers(
    controlnet: ControlNetModel, sample: str, timestep: str, context: str, hint: str
) -> list[Layer]:
    """The ControlNet up to its mid block, whose output joins the locked one's."""
    walk = UNetWalk(context)
    embedding = controlnet.controlnet_cond_embedding
    flipped = controlnet.config.controlnet_conditioning_channel_order == "bgr"
    layers = [
        Layer(
            name="time_embed",
            module=_TimeEmbed(controlnet),
            reads=(sample, timestep),
            writes=(walk.emb,),
            owns=(controlnet.time_proj, controlnet.time_embedding),
        ),
        Layer(
            name="hint_embed",
            module=_HintEmbed(embedding, flipped),
            reads=(hint,),
            writes=("hint_emb",),
            owns=(embedding,),
        ),
        Layer(
            name="conv_in",
            module=_ConvIn(controlnet.conv_in),
            reads=(sample, "hint_emb"),
            writes=walk.push(),
            owns=(controlnet.conv_in,),
        ),
    ]
    for i, block in enumerate(controlnet.down_blocks):
        layers += walk.down(f"down{i}", block)
    *mid, last = walk.mid("mid", controlnet.mid_block)
    resnet, zero = controlnet.mid_block.resnets[-1], controlnet.controlnet_mid_block
    join = Layer(
        name=last.name,
        module=_Join(resnet, zero),
        reads=(f"{LOCKED}h", walk.h, walk.emb),
        writes=(walk.h,),
        owns=(resnet, zero),
    )
    return [*layers, *mid, join]


@dataclass(frozen=True, slots=True)
class _TimeEmbed:
    controlnet: ControlNetModel

    def __call__(self, sample: Tensor, timestep: Tensor) -> Tensor:
        projected = self.controlnet.time_proj(timestep).to(sample.dtype)
        embedded: Tensor = self.controlnet.time_embedding(projected, None)
        return embedded


@dataclass(frozen=True, slots=True)
class _HintEmbed:
    embedding: nn.Module
    flipped: bool

    def __call__(self, hint: Tensor) -> Tensor:
        made: Tensor = self.embedding(hint.flip(1) if self.flipped else hint)
        return made


@dataclass(frozen=True, slots=True)
class _ConvIn:
    conv: nn.Module

    def __call__(self, sample: Tensor, hint: Tensor) -> tuple[Tensor, Tensor]:
        if sample.shape[-2:] != hint.shape[-2:]:
            raise SpecError(
                f"the latent is {sample.shape[-2]}x{sample.shape[-1]} and the embedded hint "
                f"{hint.shape[-2]}x{hint.shape[-1]}; give a hint of 8 times the latent's size"
            )
        h = self.conv(sample) + hint
        return h, h


@dataclass(frozen=True, slots=True)
class _Join:
    """The copy's last resnet, through its zero convolution onto the locked mid block's output."""

    resnet: nn.Module
    zero: nn.Module

    def __call__(self, locked: Tensor, h: Tensor, emb: Tensor) -> Tensor:
        made: Tensor = locked + self.zero(self.resnet(h, emb))
        return made


@dataclass(frozen=True, slots=True)
class _ControlledResnet:
    """A locked decoder's resnet over ``h`` and the locked skip plus the copy's."""

    resnet: nn.Module
    zero: nn.Module

    def __call__(self, h: Tensor, locked: Tensor, skip: Tensor, emb: Tensor) -> Tensor:
        made: Tensor = self.resnet(torch.cat([h, locked + self.zero(skip)], dim=1), emb)
        return made


def _refuse_unsupported(controlnet: ControlNetModel, unet: UNet2DConditionModel) -> None:
    refuse_unsupported(unet)
    config = controlnet.config
    adapters = any("IPAdapter" in type(p).__name__ for p in controlnet.attn_processors.values())
    features = {
        "the ControlNet": {
            "global_pool_conditions": config.global_pool_conditions,
            "a class embedding (class_embed_type, num_class_embeds)": (
                controlnet.class_embedding is not None
            ),
            f"addition_embed_type={config.addition_embed_type}": (
                config.addition_embed_type is not None
            ),
            f"encoder_hid_dim_type={config.encoder_hid_dim_type}": (
                controlnet.encoder_hid_proj is not None
            ),
            "an IP adapter": adapters,
            "gradient checkpointing (the plan's `recompute` does that)": (
                controlnet.is_gradient_checkpointing
            ),
        },
        # A locked layer inside a backbone is in train mode, a locked model is not.
        "the locked U-Net": {f"dropout={unet.config.dropout}": unet.config.dropout},
    }
    for model, used in features.items():
        for feature in (f for f, on in used.items() if on):
            raise UnsupportedError(
                f"{model} uses {feature}, which the layer list does not run; "
                "switch it off, or write the layers of your model yourself"
            )
    blocks = {f"down{i}": block for i, block in enumerate(controlnet.down_blocks)}
    blocks["mid"] = controlnet.mid_block
    for name, block in blocks.items():
        if type(block) not in (DownBlock2D, CrossAttnDownBlock2D, UNetMidBlock2DCrossAttn):
            raise UnsupportedError(f"the ControlNet's block {name} is a {type(block).__name__}")
    refuse_hooks({"the ControlNet": controlnet, **blocks})
    _check_fit(controlnet, unet)


def _check_fit(controlnet: ControlNetModel, unet: UNet2DConditionModel) -> None:
    """The copy must write as many skips as the decoder pops, each as wide."""
    num_skips = 1 + sum(len(b.resnets) + len(b.downsamplers or ()) for b in unet.down_blocks)
    if num_skips != len(controlnet.controlnet_down_blocks):
        raise SpecError(
            f"the ControlNet has {len(controlnet.controlnet_down_blocks)} zero convolutions for "
            f"{num_skips} skips of the U-Net; make it with ControlNetModel.from_unet"
        )
    for key in ("in_channels", "block_out_channels", "cross_attention_dim"):
        # A configuration that was read from a file has lists for tuples.
        ours, theirs = (
            tuple(v) if isinstance(v, list) else v
            for v in (controlnet.config[key], unet.config[key])
        )
        if ours != theirs:
            raise SpecError(
                f"{key} is {ours} in the ControlNet and {theirs} in the U-Net; "
                "make it with ControlNetModel.from_unet"
            )


def _trial(controlnet: ControlNetModel, unet: UNet2DConditionModel) -> Trial:
    """Narrow models of the same blocks and flags, zero convolutions drawn anew."""
    narrow = narrow_arguments(unet)
    shared = {k: v for k, v in narrow.items() if k in controlnet.config}
    hint_widths = tuple(2 for _ in controlnet.config.conditioning_embedding_out_channels)
    tiny: Any = ControlledUNet(
        type(controlnet)(
            **{
                **arguments(controlnet),
                **shared,
                "num_attention_heads": None,
                "conditioning_embedding_out_channels": hint_widths,
            }
        ),
        type(unet)(**narrow),
    )
    for zero in (*tiny.controlnet.controlnet_down_blocks, tiny.controlnet.controlnet_mid_block):
        nn.init.normal_(zero.weight, std=0.1)
    tiny.unet.eval().requires_grad_(False)
    tiny.controlnet.train()
    locked, backbone = controlnet_components(tiny.controlnet, tiny.unet, check=False)
    side = 2 ** (unet.num_upsamplers + 1)
    factor = 2 ** (len(hint_widths) - 1)
    inputs = {
        "sample": torch.randn(2, unet.config.in_channels, side, side),
        "timestep": torch.tensor([7, 123]),
        "context": torch.randn(2, 3, 8),
        "hint": torch.randn(
            2, controlnet.config.conditioning_channels, factor * side, factor * side
        ),
    }
    return Trial(
        model=tiny,
        layers=(*locked.layers, *backbone.layers),
        inputs=inputs,
        output="out",
        forward=lambda: tiny(**inputs),
    )

"""`UNet2DConditionModel` as a list of layers over named tensors, skips passed by name.

Tensors: ``h`` and the skips ``s0, s1, ..`` are ``[batch, channels, height, width]``, ``emb`` is
``[batch, dim]``, the context ``[batch, tokens, dim]``. A push writes ``h`` and the skip as one
tensor, so a skip goes straight from the stage that made it to the stage that pops it.
What the library's forward does beside this list is refused by name, and `check=True` compares a
tiny model of the same configuration with the library's forward, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.unets.unet_2d_blocks import (
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.hooks import refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import Backbone, Layer
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once


def unet_backbone(unet: UNet2DConditionModel, *, name: str = "unet", **names: Any) -> Backbone:
    """The U-Net as a backbone; `names` are those of `unet_layers`."""
    return Backbone(name=name, layers=unet_layers(unet, **names))


def unet_layers(
    unet: UNet2DConditionModel,
    *,
    sample: str = "sample",
    timestep: str = "timestep",
    context: str = "context",
    self_cond: str | None = None,
    out: str = "out",
    check: bool = True,
) -> tuple[Layer, ...]:
    """Cut a U-Net at every resnet, attention and resampling (47 layers for SD's shape).

    Args:
        unet: The model; widen its input first when `self_cond` is read.
        sample: Noisy latent ``[batch, channels, height, width]``.
        timestep: ``[batch]``.
        context: Encoded conditioning ``[batch, tokens, dim]``.
        self_cond: Previous estimate, appended to the sample's channels; None for none.
        out: Name of the output, shaped as the sample.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: The model uses a feature of the library that has no layer here.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    _refuse_unsupported(unet)
    if check:
        verify_once(config_key(unet), lambda: _trial(unet))
    extra = () if self_cond is None else (self_cond,)
    embed, proj = unet.time_embedding, unet.time_proj
    layers = [
        Layer(
            name="time_embed",
            module=_TimeEmbed(unet),
            reads=(sample, timestep),
            writes=("emb",),
            owns=(embed, proj),
        ),
        Layer(
            name="conv_in",
            module=_ConvIn(unet.conv_in, 2**unet.num_upsamplers),
            reads=(sample, *extra),
            writes=("s0", "h"),
            owns=(unet.conv_in,),
        ),
    ]
    walk = _Walk(context)
    for i, block in enumerate(unet.down_blocks):
        layers += walk.down(f"down{i}", block)
    if unet.mid_block is not None:
        layers += walk.mid("mid", unet.mid_block)
    for i, block in enumerate(unet.up_blocks):
        layers += walk.up(f"up{i}", block)
    layers.append(
        Layer(
            name="out",
            module=_Out(unet.conv_norm_out, unet.conv_act, unet.conv_out),
            reads=("h",),
            writes=(out,),
            owns=tuple(
                m for m in (unet.conv_norm_out, unet.conv_act, unet.conv_out) if m is not None
            ),
        )
    )
    check_outside(layers[:-1], (sample, timestep, context, *extra, out))
    return tuple(layers)


def check_latent(unet: UNet2DConditionModel, height: int, width: int) -> None:
    """Refuse a latent size that the upsamplers would not reach again.

    Raises:
        SpecError: `height` or `width` is not a multiple of ``2 ** num_upsamplers``.
    """
    _check_size(height, width, 2**unet.num_upsamplers)


def _check_size(height: int, width: int, multiple: int) -> None:
    if height % multiple or width % multiple:
        raise SpecError(
            f"the latent is {height}x{width}; this U-Net needs multiples of {multiple}: "
            "crop or pad, or choose another bucket size"
        )


class _Walk:
    """Makes the layers of the blocks in order and keeps the stack of skips."""

    def __init__(self, context: str) -> None:
        self.context = context
        self.skips = ["s0"]
        self.pushed = 1

    def _push(self) -> tuple[str, ...]:
        name = f"s{self.pushed}"
        self.pushed += 1
        self.skips.append(name)
        return (name, "h")

    def down(self, name: str, block: Any) -> Iterator[Layer]:
        attentions = getattr(block, "attentions", None)
        for j, resnet in enumerate(block.resnets):
            pushes = attentions is None
            yield _resnet(f"{name}.resnet{j}", resnet, self._push() if pushes else ("h",))
            if attentions is not None:
                yield self._attn(f"{name}.attn{j}", attentions[j], self._push())
        for sampler in block.downsamplers or ():
            yield Layer(
                name=f"{name}.downsample",
                module=_Twice(sampler),
                reads=("h",),
                writes=self._push(),
                owns=(sampler,),
            )

    def mid(self, name: str, block: Any) -> Iterator[Layer]:
        yield _resnet(f"{name}.resnet0", block.resnets[0], ("h",))
        for j, attention in enumerate(block.attentions):
            yield self._attn(f"{name}.attn{j}", attention, ("h",))
            yield _resnet(f"{name}.resnet{j + 1}", block.resnets[j + 1], ("h",))

    def up(self, name: str, block: Any) -> Iterator[Layer]:
        attentions = getattr(block, "attentions", None)
        for j, resnet in enumerate(block.resnets):
            yield Layer(
                name=f"{name}.resnet{j}",
                module=_UpResnet(resnet),
                reads=("h", self.skips.pop(), "emb"),
                writes=("h",),
                owns=(resnet,),
            )
            if attentions is not None:
                yield self._attn(f"{name}.attn{j}", attentions[j], ("h",))
        for sampler in block.upsamplers or ():
            yield Layer(name=f"{name}.upsample", module=sampler, reads=("h",), writes=("h",))

    def _attn(self, name: str, attention: nn.Module, writes: tuple[str, ...]) -> Layer:
        return Layer(
            name=name,
            module=_Attn(attention, len(writes) == 2),
            reads=("h", self.context),
            writes=writes,
            owns=(attention,),
        )


def _resnet(name: str, resnet: nn.Module, writes: tuple[str, ...]) -> Layer:
    module = _Resnet(resnet, len(writes) == 2)
    return Layer(name=name, module=module, reads=("h", "emb"), writes=writes, owns=(resnet,))


@dataclass(frozen=True, slots=True)
class _TimeEmbed:
    unet: UNet2DConditionModel

    def __call__(self, sample: Tensor, timestep: Tensor) -> Tensor:
        projected = self.unet.get_time_embed(sample=sample, timestep=timestep)
        embedded: Tensor = self.unet.time_embedding(projected)
        return embedded


@dataclass(frozen=True, slots=True)
class _ConvIn:
    conv: nn.Module
    multiple: int

    def __call__(self, sample: Tensor, *self_cond: Tensor) -> tuple[Tensor, Tensor]:
        _check_size(sample.shape[-2], sample.shape[-1], self.multiple)
        h = self.conv(torch.cat((sample, *self_cond), dim=1) if self_cond else sample)
        return h, h


@dataclass(frozen=True, slots=True)
class _Resnet:
    resnet: nn.Module
    pushes: bool

    def __call__(self, h: Tensor, emb: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.resnet(h, emb)
        return (h, h) if self.pushes else h


@dataclass(frozen=True, slots=True)
class _UpResnet:
    resnet: nn.Module

    def __call__(self, h: Tensor, skip: Tensor, emb: Tensor) -> Tensor:
        made: Tensor = self.resnet(torch.cat([h, skip], dim=1), emb)
        return made


@dataclass(frozen=True, slots=True)
class _Attn:
    attention: nn.Module
    pushes: bool

    def __call__(self, h: Tensor, context: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.attention(h, encoder_hidden_states=context, return_dict=False)[0]
        return (h, h) if self.pushes else h


@dataclass(frozen=True, slots=True)
class _Twice:
    """A module whose output is pushed as a skip: one tensor under two names."""

    module: nn.Module

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.module(h)
        return h, h


@dataclass(frozen=True, slots=True)
class _Out:
    norm: nn.Module | None
    act: nn.Module | None
    conv: nn.Module

    def __call__(self, h: Tensor) -> Tensor:
        if self.norm is not None and self.act is not None:
            h = self.act(self.norm(h))
        made: Tensor = self.conv(h)
        return made


def _refuse_unsupported(unet: UNet2DConditionModel) -> None:
    """Refuse what the library's forward would do and the layers do not."""
    config = unet.config
    freeu = any(getattr(b, k, None) for b in unet.up_blocks for k in ("s1", "s2", "b1", "b2"))
    adapters = any("IPAdapter" in type(p).__name__ for p in unet.attn_processors.values())
    features = {
        "center_input_sample": config.center_input_sample,
        f"time_embedding_type={config.time_embedding_type}": (
            config.time_embedding_type != "positional"
        ),
        "a class embedding (class_embed_type, num_class_embeds)": unet.class_embedding is not None,
        f"addition_embed_type={config.addition_embed_type}": config.addition_embed_type is not None,
        f"encoder_hid_dim_type={config.encoder_hid_dim_type}": unet.encoder_hid_proj is not None,
        f"time_embedding_act_fn={config.time_embedding_act_fn}": unet.time_embed_act is not None,
        "dual_cross_attention": config.dual_cross_attention,
        f"GLIGEN (attention_type={config.attention_type})": (
            config.attention_type != "default" or getattr(unet, "position_net", None) is not None
        ),
        "FreeU (call disable_freeu)": freeu,
        "an IP adapter": adapters,
        "gradient checkpointing (the plan's `recompute` does that)": unet.is_gradient_checkpointing,
    }
    for feature, used in features.items():
        if used:
            raise UnsupportedError(
                f"{type(unet).__name__} uses {feature}, which the layer list does not run; "
                "switch it off, or write the layers of your model yourself"
            )
    kinds: list[tuple[str, nn.Module, tuple[type, ...]]] = []
    for i, (down, up) in enumerate(zip(unet.down_blocks, unet.up_blocks, strict=True)):
        kinds.append((f"down{i}", down, (DownBlock2D, CrossAttnDownBlock2D)))
        kinds.append((f"up{i}", up, (UpBlock2D, CrossAttnUpBlock2D)))
    if unet.mid_block is not None:
        kinds.append(("mid", unet.mid_block, (UNetMidBlock2DCrossAttn,)))
    for name, block, known in kinds:
        if type(block) not in known:
            raise UnsupportedError(
                f"block {name} is a {type(block).__name__}; known here: "
                f"{', '.join(k.__name__ for k in known)}"
            )
    refuse_hooks({"the U-Net": unet, **{name: block for name, block, _ in kinds}})


def _trial(unet: UNet2DConditionModel) -> Trial:
    """A narrow model of the same blocks and flags."""
    config = arguments(unet)
    widths = sorted(set(config["block_out_channels"]))
    levels = len(config["block_out_channels"])
    narrow = {
        "block_out_channels": tuple(
            8 * (1 + widths.index(w)) for w in config["block_out_channels"]
        ),
        "attention_head_dim": 2,  # the number of heads, in spite of its name
        "cross_attention_dim": 8,
        "norm_num_groups": config["norm_num_groups"] and 2,
        "sample_size": 2**levels,
        "time_embedding_dim": config["time_embedding_dim"] and 16,
    }
    tiny: UNet2DConditionModel = type(unet)(**{**config, **narrow})
    tiny.train()
    side = 2 ** (unet.num_upsamplers + 1)
    sample = torch.randn(2, tiny.config.in_channels, side, side)
    timestep, context = torch.tensor([7, 123]), torch.randn(2, 3, 8)
    return Trial(
        model=tiny,
        layers=unet_layers(tiny, check=False),
        inputs={"sample": sample, "timestep": timestep, "context": context},
        output="out",
        forward=lambda: tiny(sample, timestep, context, return_dict=False)[0],
    )

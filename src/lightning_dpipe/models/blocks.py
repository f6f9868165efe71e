"""Layers of diffusers' U-Net blocks: one resnet, attention or resampling each.

Tensors: ``h`` and the skips ``s0, s1, ..`` are ``[batch, channels, height, width]``, ``emb`` is
``[batch, dim]``, the context ``[batch, tokens, dim]``. A push writes ``h`` and the skip as one
tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Layer


def check_size(height: int, width: int, multiple: int) -> None:
    """Refuse a latent size that the upsamplers would not reach again.

    Raises:
        SpecError: `height` or `width` is not a multiple of `multiple`.
    """
    if height % multiple or width % multiple:
        raise SpecError(
            f"the latent is {height}x{width}; this U-Net needs multiples of {multiple}: "
            "crop or pad, or choose another bucket size"
        )


class UNetWalk:
    """Makes the layers of the blocks in order and keeps the stack of skips.

    `prefix` stands before the names of all tensors, so that two U-Nets can live side by side.
    """

    def __init__(self, context: str, prefix: str = "") -> None:
        self.context = context
        self.prefix = prefix
        self.h, self.emb = f"{prefix}h", f"{prefix}emb"
        self.skips: list[str] = []
        self._num_pushed = 0

    def push(self) -> tuple[str, ...]:
        """Names of a tensor that is the next skip and ``h``."""
        name = f"{self.prefix}s{self._num_pushed}"
        self._num_pushed += 1
        self.skips.append(name)
        return (name, self.h)

    def time_embed(self, unet: UNet2DConditionModel, sample: str, timestep: str) -> Layer:
        """The time embedding."""
        return Layer(
            name="time_embed",
            module=_TimeEmbed(unet),
            reads=(sample, timestep),
            writes=(self.emb,),
            owns=(unet.time_embedding, unet.time_proj),
        )

    def conv_in(self, conv: nn.Module, multiple: int, reads: tuple[str, ...]) -> Layer:
        """The first convolution, of the concatenated `reads`; checks the latent's size."""
        return Layer(
            name="conv_in",
            module=_ConvIn(conv, multiple),
            reads=reads,
            writes=self.push(),
            owns=(conv,),
        )

    def down(self, name: str, block: Any) -> Iterator[Layer]:
        """An encoder block; every resolution's outputs are pushed."""
        attentions = getattr(block, "attentions", None)
        for j, resnet in enumerate(block.resnets):
            pushes = attentions is None
            yield self._resnet(f"{name}.resnet{j}", resnet, self.push() if pushes else (self.h,))
            if attentions is not None:
                yield self._attn(f"{name}.attn{j}", attentions[j], self.push())
        for sampler in block.downsamplers or ():
            yield Layer(
                name=f"{name}.downsample",
                module=_Twice(sampler),
                reads=(self.h,),
                writes=self.push(),
                owns=(sampler,),
            )

    def mid(self, name: str, block: Any) -> Iterator[Layer]:
        """The block between encoder and decoder."""
        yield self._resnet(f"{name}.resnet0", block.resnets[0], (self.h,))
        for j, attention in enumerate(block.attentions):
            yield self._attn(f"{name}.attn{j}", attention, (self.h,))
            yield self._resnet(f"{name}.resnet{j + 1}", block.resnets[j + 1], (self.h,))

    def up(self, name: str, block: Any) -> Iterator[Layer]:
        """A decoder block; each resnet pops a skip."""
        attentions = getattr(block, "attentions", None)
        for j, resnet in enumerate(block.resnets):
            yield self.up_resnet(f"{name}.resnet{j}", resnet)
            if attentions is not None:
                yield self._attn(f"{name}.attn{j}", attentions[j], (self.h,))
        for sampler in block.upsamplers or ():
            yield Layer(name=f"{name}.upsample", module=sampler, reads=(self.h,), writes=(self.h,))

    def up_resnet(self, name: str, resnet: nn.Module) -> Layer:
        """A decoder's resnet over ``h`` and the skip it pops."""
        return Layer(
            name=name,
            module=_UpResnet(resnet),
            reads=(self.h, self.skips.pop(), self.emb),
            writes=(self.h,),
            owns=(resnet,),
        )

    def out(self, unet: UNet2DConditionModel, out: str, name: str = "out") -> Layer:
        """The last norm and convolution."""
        head = (unet.conv_norm_out, unet.conv_act, unet.conv_out)
        return Layer(
            name=name,
            module=_Out(*head),
            reads=(self.h,),
            writes=(out,),
            owns=tuple(m for m in head if m is not None),
        )

    def _resnet(self, name: str, resnet: nn.Module, writes: tuple[str, ...]) -> Layer:
        """A resnet; two `writes`: its output is pushed."""
        return Layer(
            name=name,
            module=_Resnet(resnet, len(writes) == 2),
            reads=(self.h, self.emb),
            writes=writes,
            owns=(resnet,),
        )

    def _attn(self, name: str, attention: nn.Module, writes: tuple[str, ...]) -> Layer:
        return Layer(
            name=name,
            module=_Attn(attention, len(writes) == 2),
            reads=(self.h, self.context),
            writes=writes,
            owns=(attention,),
        )


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
        check_size(sample.shape[-2], sample.shape[-1], self.multiple)
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

"""Extra input channels that change nothing until they are trained: for self-conditioning."""

import torch
from diffusers import (
    DiTTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError

PATCHED = (DiTTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel)
"""Transformers whose first layer cuts the latent into patches by a convolution."""


def widen_input(model: nn.Module, extra_channels: int) -> None:
    """Give a model's first convolution `extra_channels` more input channels, in place.

    The new weights are zero, so the output stays what it was, and they get a gradient. The
    configuration follows (``in_channels``; ``out_channels`` is pinned), so that a saved model
    loads. Call it before the layer list is made.

    Raises:
        SpecError: `extra_channels` is below 1.
        UnsupportedError: The model's class has no known input convolution.
    """
    if extra_channels < 1:
        raise SpecError(f"extra_channels is {extra_channels}; expected at least 1")
    if isinstance(model, UNet2DConditionModel):
        model.conv_in = _widened(model.conv_in, extra_channels)
        conv, out_channels = model.conv_in, model.config.out_channels
    elif isinstance(model, PATCHED):
        model.pos_embed.proj = _widened(model.pos_embed.proj, extra_channels)
        conv, out_channels = model.pos_embed.proj, model.out_channels
    else:
        known = ", ".join(kind.__name__ for kind in (UNet2DConditionModel, *PATCHED))
        raise UnsupportedError(
            f"widen_input does not know the input convolution of {type(model).__name__}; "
            f"it knows {known}"
        )
    model.register_to_config(in_channels=conv.in_channels, out_channels=out_channels)


def _widened(conv: nn.Conv2d, extra_channels: int) -> nn.Conv2d:
    weight = conv.weight
    wide = nn.Conv2d(
        conv.in_channels + extra_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        bias=conv.bias is not None,
        padding_mode=conv.padding_mode,
        device="meta",
        dtype=weight.dtype,
    )
    zeros = weight.new_zeros((weight.shape[0], extra_channels, *weight.shape[2:]))
    wide.weight = nn.Parameter(
        torch.cat([weight.detach(), zeros], dim=1), requires_grad=weight.requires_grad
    )
    # The bias keeps its identity: an optimizer or a tied module may hold it already.
    wide.bias = conv.bias
    return wide

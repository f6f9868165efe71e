"""`UNet2DConditionModel` as a list of layers over named tensors, skips passed by name.

Tensors: ``h`` and the skips ``s0, s1, ..`` are ``[batch, channels, height, width]``, ``emb`` is
``[batch, dim]``, the context ``[batch, tokens, dim]``. A push writes ``h`` and the skip as one
tensor, so a skip goes straight from the stage that made it to the stage that pops it.
What the library's forward does beside this list is refused by name, and `check=True` compares a
tiny model of the same configuration with the library's forward, bit for bit.
"""

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
from torch import nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.blocks import UNetWalk, check_size
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
    prefix: str = "",
    check: bool = True,
) -> tuple[Layer, ...]:
    """Cut a U-Net at every resnet, attention and resampling (47 layers for SD's shape).

    Args:
        unet: The model; widen its input first when `self_cond` is read.
        sample: Noisy latent ``[batch, channels, height, width]``.
        timestep: ``[batch]``.
        context: Encoded conditioning ``[batch, tokens, dim]``.
        self_cond: Previous estimate, or another picture of the sample's size, appended to its
            channels; None for none.
        out: Name of the output, shaped as the sample.
        prefix: Before the names of the tensors in between.
        check: Compare with the library's forward, once per configuration and process.

    Raises:
        UnsupportedError: The model uses a feature of the library that has no layer here.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    refuse_unsupported(unet)
    if check:
        verify_once(config_key(unet), lambda: _trial(unet))
    extra = () if self_cond is None else (self_cond,)
    walk = UNetWalk(context, prefix)
    layers = [
        walk.time_embed(unet, sample, timestep),
        walk.conv_in(unet.conv_in, 2**unet.num_upsamplers, (sample, *extra)),
    ]
    for i, block in enumerate(unet.down_blocks):
        layers += walk.down(f"down{i}", block)
    if unet.mid_block is not None:
        layers += walk.mid("mid", unet.mid_block)
    for i, block in enumerate(unet.up_blocks):
        layers += walk.up(f"up{i}", block)
    layers.append(walk.out(unet, out))
    check_outside(layers[:-1], (sample, timestep, context, *extra, out))
    return tuple(layers)


def check_latent(unet: UNet2DConditionModel, height: int, width: int) -> None:
    """Refuse a latent size that the upsamplers would not reach again.

    Raises:
        SpecError: `height` or `width` is not a multiple of ``2 ** num_upsamplers``.
    """
    check_size(height, width, 2**unet.num_upsamplers)


def refuse_unsupported(unet: UNet2DConditionModel) -> None:
    """Refuse what the library's forward would do and the layers do not.

    Raises:
        UnsupportedError: The model uses such a feature; the message names it.
    """
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


def narrow_arguments(unet: UNet2DConditionModel) -> dict[str, Any]:
    """Constructor arguments of a narrow model of the same blocks and flags."""
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
    return {**config, **narrow}


def _trial(unet: UNet2DConditionModel) -> Trial:
    tiny: UNet2DConditionModel = type(unet)(**narrow_arguments(unet))
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

"""The encoder of `AutoencoderKL` as a chain: conv_in | every resnet and resampling | out.

In:     images ``[batch, channels, height, width]``.
Out:    moments ``[batch, 2 x latent channels, height / 8, width / 8]``: mean and log-variance of
        the posterior, what the library's ``encode`` returns as ``latent_dist.parameters``.
The first blocks of an encoder at full resolution take most of its time, so each of their resnets is
a layer: a plan can run a few layers on a few samples in a short bubble. Drawing a latent from the
moments is a layer of its own (`objective.latents`), keyed by sample, so that encoding a batch in
parts draws what encoding it at once does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D, UNetMidBlock2D
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.hooks import refuse_hooks
from lightning_dpipe.models.names import check_outside
from lightning_dpipe.models.spec import Layer
from lightning_dpipe.models.verify import Trial, arguments, config_key, verify_once


def vae_encoder_layers(
    vae: AutoencoderKL, *, image: str = "image", moments: str = "moments", check: bool = True
) -> tuple[Layer, ...]:
    """Cut the encoder (16 layers for SD's shape); the decoder is not run.

    Args:
        vae: The autoencoder.
        image: Pixels, ``[batch, channels, height, width]``.
        moments: Name of the output.
        check: Compare with the library's ``encode``, once per configuration and process.

    Raises:
        UnsupportedError: The model uses a feature of the library that has no layer here.
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    _refuse_unsupported(vae)
    if check:
        verify_once(f"{config_key(vae)} encode", lambda: _trial(vae))
    encoder = vae.encoder
    head = (encoder.conv_norm_out, encoder.conv_act, encoder.conv_out, vae.quant_conv)
    steps = tuple(m for m in head if m is not None)
    layers = (
        Layer(name="conv_in", module=encoder.conv_in, reads=(image,), writes=("h",)),
        *_blocks(encoder),
        Layer(name="out", module=_Chain(steps), reads=("h",), writes=(moments,), owns=steps),
    )
    check_outside(layers[:-1], (image, moments))
    return layers


def _blocks(encoder: Any) -> Iterator[Layer]:
    for i, block in enumerate(encoder.down_blocks):
        for j, resnet in enumerate(block.resnets):
            yield _resnet(f"down{i}.resnet{j}", resnet)
        for sampler in block.downsamplers or ():
            yield Layer(name=f"down{i}.downsample", module=sampler, reads=("h",), writes=("h",))
    mid = encoder.mid_block
    yield _resnet("mid.resnet0", mid.resnets[0])
    for j, attention in enumerate(mid.attentions):
        if attention is not None:
            yield Layer(name=f"mid.attn{j}", module=attention, reads=("h",), writes=("h",))
        yield _resnet(f"mid.resnet{j + 1}", mid.resnets[j + 1])


def _resnet(name: str, resnet: nn.Module) -> Layer:
    return Layer(name=name, module=_Resnet(resnet), reads=("h",), writes=("h",), owns=(resnet,))


@dataclass(frozen=True, slots=True)
class _Resnet:
    resnet: nn.Module

    def __call__(self, h: Tensor) -> Tensor:
        made: Tensor = self.resnet(h, None)
        return made


@dataclass(frozen=True, slots=True)
class _Chain:
    steps: tuple[nn.Module, ...]

    def __call__(self, h: Tensor) -> Tensor:
        for step in self.steps:
            h = step(h)
        return h


def _refuse_unsupported(vae: AutoencoderKL) -> None:
    features = {
        "tiling (call disable_tiling)": vae.use_tiling,
        "slicing (call disable_slicing; plans encode in parts anyway)": vae.use_slicing,
    }
    for feature, used in features.items():
        if used:
            raise UnsupportedError(
                f"{type(vae).__name__} uses {feature}, which the layer list does not run; "
                "switch it off"
            )
    encoder = vae.encoder
    blocks = {f"down{i}": block for i, block in enumerate(encoder.down_blocks)}
    for name, block in (*blocks.items(), ("mid", encoder.mid_block)):
        if type(block) not in (DownEncoderBlock2D, UNetMidBlock2D):
            raise UnsupportedError(
                f"block {name} is a {type(block).__name__}; known here: DownEncoderBlock2D"
            )
    refuse_hooks({"the VAE": vae, "its encoder": encoder, "mid": encoder.mid_block, **blocks})


def _trial(vae: AutoencoderKL) -> Trial:
    """A narrow autoencoder of the same blocks and flags."""
    config = arguments(vae)
    widths = sorted(set(config["block_out_channels"]))
    narrow = {
        "block_out_channels": tuple(
            8 * (1 + widths.index(w)) for w in config["block_out_channels"]
        ),
        "norm_num_groups": 2,
    }
    tiny: AutoencoderKL = type(vae)(**{**config, **narrow})
    tiny.eval()
    side = 2 ** len(config["block_out_channels"])
    image = torch.randn(2, tiny.config.in_channels, side, side)
    return Trial(
        model=tiny,
        layers=vae_encoder_layers(tiny, check=False),
        inputs={"image": image},
        output="moments",
        forward=lambda: tiny.encode(image, return_dict=False)[0].parameters,
    )

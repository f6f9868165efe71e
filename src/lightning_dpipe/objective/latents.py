"""Latents as training sees them: drawn from the VAE's posterior, shifted and scaled.

In:     images, or the moments an encoder made of them, and the draw keys int64 ``[batch, 2]``.
Out:    latents float32 ``[batch, channels, height / 8, width / 8]`` of about unit variance.
Source: scaling as in diffusers' training scripts, ``(sample - shift_factor) * scaling_factor``.
"""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.spec import DRAW_KEY, FrozenComponent, Layer
from lightning_dpipe.models.vae import vae_encoder_layers
from lightning_dpipe.objective.draws import normal

_LOGVAR_MIN, _LOGVAR_MAX = -30.0, 20.0  # as in diffusers' DiagonalGaussianDistribution


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentDraw:
    """``(moments, draw_key) -> latents``; a pure function of both.

    `moments` is mean and log-variance along dimension 1.
    """

    seed: int
    scaling_factor: float
    shift_factor: float = 0.0

    @torch.no_grad()
    def __call__(self, moments: Tensor, draw_key: Tensor) -> Tensor:
        """Draw one latent per sample, keyed by seed, purpose ``latent`` and draw key."""
        mean, log_variance = moments.float().chunk(2, dim=1)
        std = torch.exp(0.5 * log_variance.clamp(_LOGVAR_MIN, _LOGVAR_MAX))
        noise = normal(self.seed, "latent", draw_key, mean.shape[1:]).to(mean.device)
        return (mean + std * noise - self.shift_factor) * self.scaling_factor


def vae_encoder(
    vae: AutoencoderKL,
    *,
    seed: int,
    image: str = "image",
    latents: str = "latents",
    name: str = "vae",
    check: bool = True,
) -> FrozenComponent:
    """The encoder and its draw as a frozen component (17 layers for SD's shape).

    Args:
        vae: The autoencoder; scaling and shift come from its configuration.
        seed: The run's seed.
        image: Pixels in ``[-1, 1]``, ``[batch, channels, height, width]``.
        latents: Name of the output.
        name: The component's name.
        check: Compare with the library's ``encode``, once per configuration and process.

    Raises:
        UnsupportedError: The model uses a feature of the library that has no layer here, or
            normalises channel by channel (``latents_mean``, ``latents_std``).
        SpecError: The comparison failed, or a given name is one the layers use themselves.
    """
    layers = vae_encoder_layers(vae, image=image, check=check)
    return FrozenComponent(name=name, layers=(*layers, _draw_layer(vae, seed, latents)))


def vae_posterior(
    vae: AutoencoderKL, *, seed: int, latents: str = "latents", name: str = "vae"
) -> FrozenComponent:
    """The draw alone, of ``moments`` that are in the batch; arguments as `vae_encoder`.

    Raises:
        UnsupportedError: As `vae_encoder`.
    """
    return FrozenComponent(name=name, layers=(_draw_layer(vae, seed, latents),))


def _draw_layer(vae: AutoencoderKL, seed: int, latents: str) -> Layer:
    config = vae.config
    if config.latents_mean is not None or config.latents_std is not None:
        raise UnsupportedError(
            "the VAE's configuration has latents_mean or latents_std, and how they combine with "
            "scaling_factor differs between models; write the sampling layer yourself"
        )
    draw = LatentDraw(
        seed=seed,
        scaling_factor=config.scaling_factor,
        shift_factor=config.shift_factor or 0.0,
    )
    return Layer(name="sample", module=draw, reads=("moments", DRAW_KEY), writes=(latents,))

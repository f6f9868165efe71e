"""Latents are the library's, drawn with noise that belongs to the sample."""

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.models.verify import run_layers
from lightning_dpipe.objective.draws import normal
from lightning_dpipe.objective.latents import LatentDraw, vae_encoder


def build(**changes: object) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, **changes).eval()


def keys(n: int) -> Tensor:
    return torch.stack([torch.full((n,), 3), torch.arange(n)], 1)


@torch.no_grad()
@pytest.mark.parametrize(("scale", "shift"), [(0.18215, None), (1.5305, 0.0609)])
def test_latents_are_the_librarys_posterior_sample_scaled_as_its_scripts_do(
    scale: float, shift: float | None
) -> None:
    vae, image = build(scaling_factor=scale, shift_factor=shift), torch.randn(2, 3, 8, 8)
    fields = {"image": image, DRAW_KEY: keys(2)}
    found = run_layers(vae_encoder(vae, seed=5).layers, fields)["latents"]
    posterior = vae.encode(image).latent_dist
    noise = normal(5, "latent", keys(2), posterior.mean.shape[1:])
    expected = posterior.mean + posterior.std * noise
    assert torch.equal(found, (expected - (shift or 0.0)) * scale)


@torch.no_grad()
def test_drawing_a_batch_in_parts_draws_what_drawing_it_at_once_does() -> None:
    moments, draw = torch.randn(5, 8, 4, 4), LatentDraw(seed=1, scaling_factor=0.5)
    parts = [draw(moments[a:b], keys(5)[a:b]) for a, b in ((0, 1), (1, 4), (4, 5))]
    assert torch.equal(torch.cat(parts), draw(moments, keys(5)))


@torch.no_grad()
def test_extreme_log_variances_stay_finite_and_half_precision_becomes_single() -> None:
    moments = torch.cat([torch.zeros(1, 2, 2, 2), torch.full((1, 2, 2, 2), 1e4)], 1)
    drawn = LatentDraw(seed=1, scaling_factor=1.0)(moments.bfloat16(), keys(1))
    assert drawn.dtype == torch.float32
    assert drawn.isfinite().all()


def test_channelwise_normalisation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="latents_mean"):
        vae_encoder(build(latents_mean=[0.0] * 4, latents_std=[1.0] * 4), seed=0)

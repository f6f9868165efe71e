"""Bands of an image over real processes: each decodes its rows, all join them to the image."""

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from lightning_dpipe.sampling.bands import DistBands
from lightning_dpipe.sampling.vae_bands import decode_band, join_bands
from ranks import run_ranks

pytestmark = pytest.mark.dist
BANDS = (1, 4, 2)


def decode(rank: int) -> tuple[Tensor, Tensor]:
    """This rank's joined image, and the library's of the whole."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
    ).eval()
    latents = torch.randn(2, 4, sum(BANDS), 5)
    group = DistBands()
    assert (group.rank, group.size) == (rank, 3)
    joined = join_bands(decode_band(vae, latents, group, bands=BANDS), group, BANDS, sum(BANDS))
    with torch.no_grad():
        return joined, vae.decode(latents, return_dict=False)[0]


def test_uneven_bands_over_three_processes_are_the_image() -> None:
    found = run_ranks(decode, 3, timeout_s=180)  # three imports of diffusers
    for joined, whole in found:
        assert joined.shape == whole.shape == (2, 3, 14, 10)
        assert torch.equal(joined, found[0][0])
        assert float((joined - whole).abs().max() / whole.abs().max()) <= 1e-5

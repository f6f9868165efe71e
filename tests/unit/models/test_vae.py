"""The VAE encoder's layers against the library's own encode."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.vae import vae_encoder_layers
from lightning_dpipe.models.verify import run_layers

NARROW: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 16, 16, 16),
    "layers_per_block": 2,
    "norm_num_groups": 4,
}


def build(**changes: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(**{**NARROW, **changes}).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_quant_conv": False, "latent_channels": 16},
        {"mid_block_add_attention": False},
        {"layers_per_block": 1},
    ],
)
def test_moments_are_those_of_the_librarys_encode_bit_for_bit(changes: dict[str, Any]) -> None:
    vae, image = build(**changes), torch.randn(3, 3, 32, 48)
    moments = run_layers(vae_encoder_layers(vae), {"image": image})["moments"]
    assert torch.equal(moments, vae.encode(image).latent_dist.parameters)


def test_sds_encoder_has_sixteen_layers_that_own_all_its_weights() -> None:
    with torch.device("meta"):
        vae = AutoencoderKL(**{**NARROW, "block_out_channels": (128, 256, 512, 512)})
    layers = vae_encoder_layers(vae, check=False)
    assert [x.name for x in layers][:4] == ["conv_in", "down0.resnet0", "down0.resnet1",
                                            "down0.downsample"]  # fmt: skip
    assert len(layers) == 16
    owned = [id(p) for layer in layers for p in layer.parameters()]
    encoder = [*vae.encoder.parameters(), *vae.quant_conv.parameters()]
    assert sorted(owned) == sorted(map(id, encoder))


@pytest.mark.parametrize(
    ("message", "switch"),
    [
        ("tiling", lambda vae: vae.enable_tiling()),
        ("slicing", lambda vae: vae.enable_slicing()),
        ("its encoder .* hooks", lambda vae: vae.encoder.register_forward_hook(lambda *_: None)),
    ],
)
def test_what_the_layers_do_not_run_is_refused_by_name(message: str, switch: Any) -> None:
    vae = build()
    switch(vae)
    with pytest.raises(UnsupportedError, match=message):
        vae_encoder_layers(vae, check=False)


def test_blocks_with_attention_at_full_resolution_are_refused() -> None:
    vae = build(down_block_types=("DownEncoderBlock2D",) * 3 + ("AttnDownEncoderBlock2D",))
    with pytest.raises(UnsupportedError, match="down3 is a AttnDownEncoderBlock2D"):
        vae_encoder_layers(vae, check=False)


def test_a_name_that_the_layers_use_themselves_is_refused() -> None:
    with pytest.raises(SpecError, match="'h' is a name"):
        vae_encoder_layers(build(), image="h", check=False)

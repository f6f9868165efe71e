"""Full-size configurations have the published numbers of parameters, and use no memory."""

from collections.abc import Mapping
from typing import Any

import pytest
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import nn

from lightning_dpipe.models import presets

COUNTS: list[tuple[type[nn.Module], Mapping[str, Any], int]] = [
    (UNet2DConditionModel, presets.SD21_UNET, 865_910_724),
    (UNet2DConditionModel, presets.SD21_BASE_UNET, 865_910_724),
    (UNet2DConditionModel, presets.SD15_UNET, 859_520_964),
    (ControlNetModel, presets.CONTROLNET_SD15, 361_279_120),
    (ControlNetModel, presets.CONTROLNET_SD21, 364_228_240),
    (AutoencoderKL, presets.SD_VAE, 83_653_863),
    (DiTTransformer2DModel, presets.DIT_XL_2_256, 749_826_464),
    (PixArtTransformer2DModel, presets.PIXART_ALPHA_512, 610_856_096),
    (SD3Transformer2DModel, presets.SD3_M, 2_028_328_000),
    (SD3Transformer2DModel, presets.SD35_M, 2_243_171_520),
    (SD3Transformer2DModel, presets.SD35_L, 8_056_627_520),
    (FluxTransformer2DModel, presets.FLUX_DEV, 11_901_408_320),
]


@pytest.mark.parametrize(("kind", "config", "count"), COUNTS)
def test_diffusers_models_have_the_published_size(
    kind: type[nn.Module], config: Mapping[str, Any], count: int
) -> None:
    model = presets.on_meta(kind, config)
    assert sum(p.numel() for p in model.parameters()) == count
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "count"), [(presets.SD21_TEXT, 340_387_840), (presets.SD15_TEXT, 123_060_480)]
)
def test_text_encoders_have_the_published_size(config: Mapping[str, Any], count: int) -> None:
    model = presets.text_encoder_on_meta(config)
    assert sum(p.numel() for p in model.parameters()) == count
    assert not any(p.requires_grad for p in model.parameters())

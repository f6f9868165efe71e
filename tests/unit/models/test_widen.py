"""Widening an input changes nothing but what can be learnt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.widen import widen_input


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def dit() -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, num_layers=1, sample_size=8
    ).eval()


def run(model: Any, x: Tensor) -> Tensor:
    other = torch.ones(2, 3, 8) if isinstance(model, UNet2DConditionModel) else torch.tensor([1, 2])
    output: Tensor = model(x, torch.tensor([5, 9]), other, return_dict=False)[0]
    return output


def entry(model: Any) -> nn.Conv2d:
    conv = model.conv_in if isinstance(model, UNet2DConditionModel) else model.pos_embed.proj
    assert isinstance(conv, nn.Conv2d)
    return conv


@pytest.mark.parametrize("make", [unet, dit])
def test_the_output_stays_and_the_new_channels_get_a_gradient(make: Any) -> None:
    model = make()
    x, extra = torch.randn(2, 4, 8, 8), torch.randn(2, 3, 8, 8)
    before = run(model, x).detach()
    names = [name for name, _ in model.named_parameters()]
    widen_input(model, 3)
    after = run(model, torch.cat([x, extra], dim=1))
    assert float((before - after.detach()).abs().max()) <= 1e-6
    after.square().sum().backward()
    grad = entry(model).weight.grad
    assert grad is not None
    assert bool(grad[:, 4:].any())
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("make", [unet, dit])
def test_a_saved_model_loads_with_its_new_width(make: Any, tmp_path: Path) -> None:
    model = make()
    widen_input(model, 4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    x = torch.randn(2, 8, 8, 8)
    assert run(loaded.eval(), x).shape == (2, 4, 8, 8)
    assert torch.equal(run(loaded.eval(), x), run(model.eval(), x))


def test_a_model_on_meta_widens_without_memory() -> None:
    with torch.device("meta"):
        model = unet()
    widen_input(model, 4)
    assert entry(model).weight.is_meta
    assert entry(model).weight.shape == (8, 8, 3, 3)


def test_unknown_models_and_widths_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="input convolution of Linear"):
        widen_input(nn.Linear(2, 2), 1)
    with pytest.raises(SpecError, match="extra_channels is 0"):
        widen_input(unet(), 0)

"""A model that is its own target: twice the outputs, one gradient."""

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Layer
from lightning_dpipe.models.targets import with_target
from lightning_dpipe.models.unet import unet_layers
from saved import UNET

NAMES = ("sample", "timestep", "out")


def run(layers: tuple[Layer, ...], values: dict[str, Tensor]) -> dict[str, Tensor]:
    values = dict(values)
    for layer in layers:
        made = layer.module(*[values[name] for name in layer.reads])
        values.update(zip(layer.writes, made if isinstance(made, tuple) else (made,), strict=True))
    return values


def both(unet: UNet2DConditionModel) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    second = {name: f"second_{name}" for name in NAMES}
    return unet_layers(unet), unet_layers(unet, **second, prefix="t_")


def test_outputs_are_those_of_two_runs_and_gradients_those_of_the_first() -> None:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**UNET)
    values = {
        "context": torch.randn(2, 3, 8),
        "sample": torch.randn(2, 4, 4, 4), "timestep": torch.tensor([3, 700]),
        "second_sample": torch.randn(2, 4, 4, 4), "second_timestep": torch.tensor([1, 650]),
    }  # fmt: skip
    own, other = both(unet)
    joined = run(with_target(own, other), values)
    alone, second = run(own, values), run(other, values)
    assert torch.equal(joined["out"], alone["out"])
    assert torch.equal(joined["second_out"], second["second_out"])
    assert not joined["second_out"].requires_grad
    # Both outputs in the loss, so that a gradient through the second would show.
    (joined["out"] - joined["second_out"]).square().sum().backward()
    found = {n: p.grad for n, p in unet.named_parameters()}
    unet.zero_grad()
    (alone["out"] - second["second_out"].detach()).square().sum().backward()
    for name, p in unet.named_parameters():
        assert p.grad is not None
        assert torch.equal(found[name], p.grad), name


def test_layers_of_other_weights_names_or_number_are_refused() -> None:
    unet = UNet2DConditionModel(**UNET)
    own, other = both(unet)
    with pytest.raises(SpecError, match=r"'time_embed' .* hold different weights"):
        with_target(own, both(UNet2DConditionModel(**UNET))[1])
    with pytest.raises(SpecError, match=r"'time_embed' and its target both write \['emb'\]"):
        with_target(own, own)
    with pytest.raises(SpecError, match=f"{len(own)} layers and {len(own) - 1} of their target"):
        with_target(own, other[:-1])

"""A recorded build has the values, and leaves the generator, of a plain one."""

from collections.abc import Callable

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DiTTransformer2DModel,
    PixArtTransformer2DModel,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from lightning_dpipe.models.deferred import fill_in, recording
from lightning_dpipe.models.widen import widen_input
from lightning_dpipe.profiling.standins import standing_in


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=4,
    )


def controlnet() -> nn.Module:
    """Copies weights of one model to another, then widens the first."""
    model = unet()
    copy = ControlNetModel.from_unet(model)
    widen_input(model, 4)
    return nn.ModuleList([model, copy])


def pixart() -> nn.Module:
    return PixArtTransformer2DModel(
        sample_size=8, num_layers=1, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        cross_attention_dim=16, caption_channels=16,
    )  # fmt: skip


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        sample_size=8, num_layers=1, num_attention_heads=2, attention_head_dim=8, in_channels=4,
        num_embeds_ada_norm=10,
    )  # fmt: skip


def text() -> nn.Module:
    config = CLIPTextConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=50, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return CLIPTextModel(config)


def initialised(change: Callable[[torch.Tensor], object]) -> nn.Module:
    """Initialisers that read what they have drawn, and reads that choose what comes next."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 4))
    change(model[0].weight)
    model[2].weight = model[0].weight  # tied
    return model


def scaled(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.div_(weight.std())
        if weight[0, 0] > 0:
            nn.init.normal_(weight[1:3])


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "controlnet": controlnet,
    "pixart": pixart,
    "dit": dit,
    "vae": lambda: AutoencoderKL(block_out_channels=(32,)),
    "text": text,
    "rejection": lambda: initialised(lambda w: nn.init.trunc_normal_(w, a=-1.0, b=1.0)),
    "orthogonal": lambda: initialised(nn.init.orthogonal_),
    "reads": lambda: initialised(scaled),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
}


@pytest.mark.parametrize("name", BUILDS)
def test_any_weight_of_a_recorded_build_has_the_bits_of_a_plain_one(name: str) -> None:
    torch.manual_seed(3)
    plain = BUILDS[name]()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with recording() as made:
        later = BUILDS[name]()
    assert torch.equal(torch.get_rng_state(), after)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(later.named_parameters(remove_duplicate=False))
    assert list(found) == list(expected)
    absent = [n for n, p in found.items() if p.is_meta]
    assert sum(expected[n].numel() for n in absent) > 0.9 * sum(
        p.numel() for p in plain.parameters()
    )
    for n in reversed(list(found)):  # any order
        assert torch.equal(made.value(found[n]), expected[n]), n
    assert torch.equal(torch.get_rng_state(), after)
    buffers = dict(later.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in plain.named_buffers())


def test_a_filled_model_runs_trains_and_keeps_its_ties() -> None:
    torch.manual_seed(0)
    plain = BUILDS["reads"]()
    torch.manual_seed(0)
    with recording() as made:
        later = BUILDS["reads"]()
    sources = {p: p.detach() for p in later.parameters()}
    for parameter, source in sources.items():
        fill_in(parameter, made.value(source))
    assert later[2].weight is later[0].weight
    assert all(type(p) is nn.Parameter and p.requires_grad for p in later.parameters())
    for model in (plain, later):
        model[0](torch.ones(2, 8)).sum().backward()
    assert torch.equal(later[0].weight.grad, plain[0].weight.grad)


def test_what_leaves_torch_raises_so_that_the_caller_can_build_plainly() -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)), recording():
        nn.Linear(2, 2).weight.detach().numpy()
    assert not nn.Linear(2, 2).weight.is_meta


def test_stand_ins_come_and_go_without_changing_the_object() -> None:
    layer = nn.Linear(300, 400, device="meta")
    before = layer.weight
    with standing_in(tuple(layer.parameters()), torch.device("cpu")) as made_up:
        out = layer(torch.randn(64, 300)).detach()
        assert made_up
        assert layer.weight is before
        assert float(out.std()) == pytest.approx(1.0, abs=0.2)
    assert layer.weight is before
    assert layer.weight.is_meta
    assert layer.weight.shape == (400, 300)

"""The U-Net's layers against the library's forward, whole and cut everywhere."""

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import IPAdapterAttnProcessor
from torch import Tensor

from lightning_dpipe.core.crossings import crossings
from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.unet import check_latent, unet_backbone, unet_layers
from reference import run_once
from staged import bound, run_staged, spec_of, stages_at

SD_SHAPED: dict[str, Any] = {  # SD's blocks, one layer each, narrow
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (16, 32, 32, 32),
    "norm_num_groups": 8,
    "cross_attention_dim": 8,
    "attention_head_dim": (2, 4, 4, 4),
    "use_linear_projection": True,
}
EMOJI: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 12,
    "out_channels": 12,
    "block_out_channels": [48, 96, 96],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 384,
    "attention_head_dim": 4,
    "use_linear_projection": True,
    "norm_num_groups": 16,
}
SD21: dict[str, Any] = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
    "upcast_attention": True,
}
# What crosses a cut after each layer of SD2.1 but the last, MB a sample: h, live skips and the time
# embedding, fp32, 64 x 64 latents. From an independent layer list.
SD21_BOUNDARY_MB = (
    *(0.01, 5.25, 10.49, 10.49, 15.73, 15.73, 17.04, 19.67, 19.67, 22.29, 22.29, 22.94),
    *(24.25, 24.25, 25.56, 25.56, 25.89, 26.22, 26.55, 26.87, 26.87, 26.87, 26.55, 26.22),
    *(25.89, 26.87, 25.56, 25.56, 24.25, 24.25, 23.60, 23.60, 27.53, 22.29, 22.29, 19.67),
    *(19.67, 18.36, 18.36, 26.22, 15.73, 15.73, 10.49, 10.49, 5.24, 5.24),
)


def build(config: dict[str, Any], seed: int = 0) -> UNet2DConditionModel:
    torch.manual_seed(seed)
    return UNet2DConditionModel(**config).train()


def fields_of(config: dict[str, Any], side: int, channels: int | None = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "sample": torch.randn(2, channels or config.get("in_channels", 4), side, side),
        "timestep": torch.tensor([3, 700]),
        "context": torch.randn(2, 5, config["cross_attention_dim"]),
        "cotangent": torch.randn(2, config.get("out_channels", 4), side, side),
    }


def library_grads(unet: UNet2DConditionModel, f: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    out = unet(f["sample"], f["timestep"], f["context"], return_dict=False)[0]
    losses = (out * f["cotangent"]).flatten(1).sum(1)
    losses.sum().backward()
    return losses.detach(), take_grads(unet)


def take_grads(unet: torch.nn.Module) -> list[Tensor]:
    grads = [p.grad for p in unet.parameters()]
    unet.zero_grad(set_to_none=True)
    assert all(g is not None for g in grads)
    return [g for g in grads if g is not None]


def all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_every_two_stage_cut_of_an_sd_shaped_unet_is_bit_identical_to_the_library() -> None:
    unet, fields = build(SD_SHAPED), fields_of(SD_SHAPED, 16)
    losses, grads = library_grads(unet, fields)
    binding, graph = bound(unet_backbone(unet), fields)
    for cut in range(1, len(graph.backbones[0].layers)):
        assert torch.equal(run_staged(binding, graph, (cut,), fields), losses), cut
        assert all_equal(take_grads(unet), grads), cut


@pytest.mark.parametrize(("config", "num_layers"), [(SD_SHAPED, 33), (EMOJI, 25)])
def test_one_layer_per_stage_is_bit_identical_to_the_library(
    config: dict[str, Any], num_layers: int
) -> None:
    unet, fields = build(config), fields_of(config, 16)
    losses, grads = library_grads(unet, fields)
    binding, graph = bound(unet_backbone(unet), fields)
    assert len(graph.backbones[0].layers) == num_layers
    for cuts in (range(1, num_layers), (4, 9, 17)):
        assert torch.equal(run_staged(binding, graph, tuple(cuts), fields), losses)
        assert all_equal(take_grads(unet), grads)


@pytest.mark.parametrize("linear", [True, False])
def test_accumulated_micro_batches_are_bit_identical_too(linear: bool) -> None:
    config = {**SD_SHAPED, "use_linear_projection": linear}
    unet, fields = build(config), fields_of(config, 8)
    binding, graph = bound(unet_backbone(unet), fields)
    assert all(t.is_contiguous() for t in run_once(binding, graph, fields).values())
    # One sample a micro-batch: kernels take other paths for a batch of one.
    parts = [{name: t[i : i + 1] for name, t in fields.items()} for i in range(2)]
    for part in parts:
        out = unet(part["sample"], part["timestep"], part["context"], return_dict=False)[0]
        (out * part["cotangent"]).sum().backward()
    expected = take_grads(unet)
    for part in parts:
        run_staged(binding, graph, tuple(range(1, 33)), part)
    assert all_equal(take_grads(unet), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"mid_block_type": None},
        {"layers_per_block": (2, 1, 1, 2), "transformer_layers_per_block": (1, 2, 1, 1)},
        {"resnet_time_scale_shift": "scale_shift", "act_fn": "gelu"},
        {"only_cross_attention": True, "downsample_padding": 0},
        {"dropout": 0.2},
    ],
)
def test_flags_of_the_configuration_are_followed(changes: dict[str, Any]) -> None:
    # Raises if the layer list and the library differ in any bit.
    unet_layers(UNet2DConditionModel(**{**SD_SHAPED, **changes}), check=True)


def test_weights_keep_their_names_and_each_belongs_to_one_layer() -> None:
    unet = build(SD_SHAPED)
    names = [name for name, _ in unet.named_parameters()]
    owned = [id(p) for layer in unet_layers(unet) for p in layer.parameters()]
    assert [name for name, _ in unet.named_parameters()] == names
    assert sorted(owned) == sorted(id(p) for p in unet.parameters())


@pytest.fixture(scope="module")
def sd21() -> tuple[UNet2DConditionModel, ModelGraph]:
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SD21)
    fields = {k: v.to("meta") for k, v in fields_of(SD21, 64).items()}
    fields["context"] = torch.empty(2, 77, 1024, device="meta")
    return unet, trace(spec_of(unet_backbone(unet), fields))


def test_sd21_has_47_layers_and_all_its_weights(
    sd21: tuple[UNet2DConditionModel, ModelGraph],
) -> None:
    unet, graph = sd21
    layers = unet_layers(unet)
    assert len(layers) == len(graph.backbones[0].layers) == 47
    assert sum(p.numel() for layer in layers for p in layer.parameters()) == 865_910_724
    assert all(p.is_meta for p in unet.parameters())
    assert all(layer.trained and not layer.random for layer in graph.backbones[0].layers)


def test_what_crosses_each_cut_of_sd21_is_what_was_counted_by_hand(
    sd21: tuple[UNet2DConditionModel, ModelGraph],
) -> None:
    _, graph = sd21
    found = []
    for cut in range(1, 47):
        halves = stages_at("unet", 47, (cut,))
        values = [graph.values[c.value] for c in crossings(graph, halves)]
        found.append(round(sum(v.bytes_per_sample for v in values) / 1e6, 2))
    assert tuple(found) == SD21_BOUNDARY_MB


def test_self_conditioning_is_appended_to_the_samples_channels() -> None:
    config = {**SD_SHAPED, "in_channels": 8, "out_channels": 4}
    unet, fields = build(config), fields_of(config, 16, channels=4)
    fields["self_cond"] = torch.randn(2, 4, 16, 16)
    joined = {**fields, "sample": torch.cat([fields["sample"], fields["self_cond"]], 1)}
    losses, grads = library_grads(unet, joined)
    binding, graph = bound(unet_backbone(unet, self_cond="self_cond"), fields)
    assert torch.equal(run_staged(binding, graph, (7,), fields), losses)
    assert all_equal(take_grads(unet), grads)


def _freeu() -> UNet2DConditionModel:
    unet = UNet2DConditionModel(**SD_SHAPED)
    unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return unet


def _checkpointing() -> UNet2DConditionModel:
    unet = UNet2DConditionModel(**SD_SHAPED)
    unet.enable_gradient_checkpointing()
    return unet


def _ip_adapter() -> UNet2DConditionModel:
    unet = UNet2DConditionModel(**SD_SHAPED)
    processors = dict(unet.attn_processors)
    processors[next(n for n in processors if "attn2" in n)] = IPAdapterAttnProcessor(16, 8)
    unet.set_attn_processor(processors)
    return unet


def _hook() -> UNet2DConditionModel:
    unet = UNet2DConditionModel(**SD_SHAPED)
    unet.mid_block.register_forward_hook(lambda *_: None)
    return unet


UNSUPPORTED = [
    ("center_input_sample", {"center_input_sample": True}),
    ("time_embedding_type=fourier", {"time_embedding_type": "fourier"}),
    ("class embedding", {"num_class_embeds": 3}),
    ("addition_embed_type=text", {"addition_embed_type": "text", "encoder_hid_dim": None}),
    ("encoder_hid_dim_type=text_proj", {"encoder_hid_dim": 7}),
    ("time_embedding_act_fn=silu", {"time_embedding_act_fn": "silu"}),
    ("dual_cross_attention", {"dual_cross_attention": True}),
    ("GLIGEN", {"attention_type": "gated"}),
    ("down1 is a AttnDownBlock2D", {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}),
    ("up1 is a AttnUpBlock2D", {"up_block_types": ("UpBlock2D", "AttnUpBlock2D")}),
    ("mid is a UNetMidBlock2D;", {"mid_block_type": "UNetMidBlock2D"}),
    ("FreeU", _freeu),
    ("gradient checkpointing", _checkpointing),
    ("IP adapter", _ip_adapter),
    ("mid .* has hooks", _hook),
]


@pytest.mark.parametrize(("message", "make"), UNSUPPORTED, ids=[m for m, _ in UNSUPPORTED])
def test_features_without_a_layer_are_refused_by_name(message: str, make: Any) -> None:
    two = {"block_out_channels": (16, 32), "attention_head_dim": 2, "norm_num_groups": 8}
    two |= {"layers_per_block": 1, "cross_attention_dim": 64}
    two["down_block_types"] = ("DownBlock2D", "CrossAttnDownBlock2D")
    two["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    unet = make() if callable(make) else UNet2DConditionModel(**{**two, **make})
    with pytest.raises(UnsupportedError, match=message):
        unet_layers(unet, check=False)


def test_latents_that_the_upsamplers_do_not_reach_again_are_refused() -> None:
    unet = build(SD_SHAPED)
    check_latent(unet, 16, 24)
    with pytest.raises(SpecError, match="20x16; this U-Net needs multiples of 8"):
        check_latent(unet, 20, 16)
    with pytest.raises(SpecError, match="12x12; this U-Net needs multiples of 8"):
        bound(unet_backbone(unet), fields_of(SD_SHAPED, 12))


def test_a_name_that_the_layers_use_among_themselves_is_refused() -> None:
    with pytest.raises(SpecError, match="'emb' is a name that the layers use among themselves"):
        unet_layers(build(SD_SHAPED), context="emb")

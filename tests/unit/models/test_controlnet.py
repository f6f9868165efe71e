"""ControlNet's layers against the library's own forwards, whole and cut everywhere."""

from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.controlnet import ControlledUNet, controlnet_components
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Backbone, Field, FrozenComponent, Loss, PipelineSpec
from lightning_dpipe.models.verify import run_layers
from lightning_dpipe.runtime.bound import Binding
from reference import run_once
from staged import bound, run_staged

TINY: dict[str, Any] = {
    "layers_per_block": 1,
    "block_out_channels": (16, 32, 32, 32),
    "norm_num_groups": 8,
    "cross_attention_dim": 8,
    "attention_head_dim": (2, 4, 4, 4),
    "use_linear_projection": True,
}
HINT = {"conditioning_embedding_out_channels": (4, 8, 8, 8)}
FULL = {"block_out_channels": (320, 640, 1280, 1280), "layers_per_block": 2}
SD15 = {**FULL, "cross_attention_dim": 768, "attention_head_dim": 8}
SD21 = {
    **FULL,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}


def build(zero: bool = False, **changes: Any) -> ControlledUNet:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**{**TINY, **changes}).eval()
    controlnet = ControlNetModel(**{**TINY, **HINT, **changes}).train()
    if not zero:
        for conv in (*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block):
            nn.init.normal_(conv.weight, std=0.1)
            nn.init.normal_(conv.bias, std=0.1)
    return ControlledUNet(controlnet, unet)


def fields_of(side: int = 8) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "sample": torch.randn(2, 4, side, side),
        "timestep": torch.tensor([3, 700]),
        "context": torch.randn(2, 5, 8),
        "hint": torch.randn(2, 3, 8 * side, 8 * side),
        "cotangent": torch.randn(2, 4, side, side),
    }


def take_grads(model: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return grads


def expected_of(model: ControlledUNet, f: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.unet.requires_grad_(False)
    out = model(f["sample"], f["timestep"], f["context"], f["hint"])
    losses = (out * f["cotangent"]).flatten(1).sum(1)
    losses.sum().backward()
    return losses.detach(), take_grads(model)


def whole(model: ControlledUNet, f: dict[str, Tensor]) -> tuple[Binding, ModelGraph]:
    """The model as a user has it, the locked encoder a frozen component."""
    locked, backbone = controlnet_components(model.controlnet, model.unet)
    spec = PipelineSpec(
        inputs={n: Field(shape=tuple(t.shape[1:]), dtype=t.dtype) for n, t in f.items()},
        frozen=(locked,),
        backbones=(backbone,),
        loss=Loss(fn=lambda a, b: (a * b).flatten(1).sum(1), reads=("out", "cotangent")),
    )
    graph = trace(spec)
    return bind(spec, graph), graph


@torch.no_grad()
def encoded(locked: FrozenComponent, f: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields with what the locked encoder makes of them."""
    made = run_layers(locked.layers, f)
    return f | {k: v for k, v in made.items() if k.startswith("u_")}


def test_one_process_gives_the_librarys_output_and_gradients_bit_for_bit() -> None:
    model, fields = build(), fields_of()
    losses, grads = expected_of(model, fields)
    binding, graph = whole(model, fields)
    values = run_once(binding, graph, fields)
    loss = binding.losses["controlnet"]
    found = loss.fn(*[values[v] for v in loss.reads])
    assert torch.equal(found, losses)
    torch.autograd.backward(found.sum())
    assert all(p.grad is None for p in model.unet.parameters())
    assert all(p.grad is not None for p in model.controlnet.parameters())
    assert all(map(torch.equal, take_grads(model), grads))


@pytest.mark.parametrize(
    "cuts", [(), (17,), (8, 20), (3, 14, 18, 25), tuple(range(1, 34))],
    ids=["1", "2", "3", "5", "one layer each"],
)  # fmt: skip
def test_every_cut_is_bit_identical_to_the_library(cuts: tuple[int, ...]) -> None:
    model, fields = build(), fields_of()
    losses, grads = expected_of(model, fields)
    locked, backbone = controlnet_components(model.controlnet, model.unet)
    assert len(backbone.layers) == 34
    inputs = encoded(locked, fields)
    binding, graph = bound(backbone, inputs)
    assert torch.equal(run_staged(binding, graph, cuts, inputs), losses)
    assert all(p.grad is None for p in model.unet.parameters())
    assert all(map(torch.equal, take_grads(model), grads))


def test_the_locked_decoder_passes_gradients_and_trains_nothing_but_zero_convolutions() -> None:
    model = build()
    _, graph = whole(model, fields_of())
    locked, backbone = graph.components
    assert not any(layer.passes_grad for layer in locked.layers)
    assert all(layer.passes_grad for layer in backbone.layers)
    trained = {layer.name: layer.trained for layer in backbone.layers}
    assert {n for n, t in trained.items() if n.startswith("unet.") and t} == {
        f"unet.up{i}.resnet{j}" for i in range(4) for j in range(2)
    }
    assert all(t for n, t in trained.items() if not n.startswith("unet."))
    skips = [v for v in graph.side_inputs if graph.values[v].name.startswith("u_")]
    assert len(skips) == 8 + 2  # every skip, the mid block's output, the embedding


def test_from_zero_convolutions_only_those_get_a_gradient_and_the_output_is_the_unets() -> None:
    model, fields = build(zero=True), fields_of()
    binding, graph = whole(model, fields)
    values = run_once(binding, graph, fields)
    loss = binding.losses["controlnet"]
    plain = model.unet(fields["sample"], fields["timestep"], fields["context"]).sample
    assert torch.equal(values[loss.reads[0]], plain)
    torch.autograd.backward(loss.fn(*[values[v] for v in loss.reads]).sum())
    moved = {n for n, p in model.controlnet.named_parameters() if p.grad is not None
             and p.grad.any()}  # fmt: skip
    assert moved
    assert all(n.startswith(("controlnet_down_blocks", "controlnet_mid_block")) for n in moved)


@pytest.mark.parametrize(
    ("config", "total"), [(SD15, 361_279_120), (SD21, 364_228_240)], ids=["sd15", "sd21"]
)
def test_full_size_parameter_counts(config: dict[str, Any], total: int) -> None:
    with torch.device("meta"):
        unet, controlnet = UNet2DConditionModel(**config), ControlNetModel(**config)
    locked, backbone = controlnet_components(controlnet, unet, check=False)
    trained = [p for x in backbone.layers for p in x.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == total
    assert sum(p.numel() for p in controlnet.parameters()) == total
    assert len(backbone.layers) == 48
    owned = [id(p) for c in (locked, backbone) for x in c.layers for p in x.parameters()]
    assert sorted(owned) == sorted(id(p) for m in (unet, controlnet) for p in m.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"use_linear_projection": False, "only_cross_attention": True},
        {"resnet_time_scale_shift": "scale_shift", "act_fn": "gelu"},
        {"transformer_layers_per_block": (1, 2, 1, 1), "layers_per_block": 2},
    ],
)
def test_flags_of_the_configuration_are_followed(changes: dict[str, Any]) -> None:
    model = build(**changes)  # raises if the layer list and the library differ in any bit
    controlnet_components(model.controlnet, model.unet, check=True)


def test_a_bgr_hint_is_turned_around() -> None:
    model, fields = build(), fields_of()
    config = {**TINY, **HINT, "controlnet_conditioning_channel_order": "bgr"}
    turned = ControlNetModel(**config)
    turned.load_state_dict(model.controlnet.state_dict())
    first = outputs(model.controlnet, model.unet, fields)
    second = outputs(turned, model.unet, fields | {"hint": fields["hint"].flip(1)})
    assert torch.equal(first, second)


@torch.no_grad()
def outputs(
    controlnet: ControlNetModel, unet: UNet2DConditionModel, f: dict[str, Tensor]
) -> Tensor:
    locked, backbone = controlnet_components(controlnet, unet)
    return run_layers((*locked.layers, *backbone.layers), f)["out"]


UNSUPPORTED = [
    ("global_pool_conditions", {"global_pool_conditions": True}, {}),
    ("class embedding", {"num_class_embeds": 3}, {}),
    ("mid is a UNetMidBlock2D", {"mid_block_type": "UNetMidBlock2D"}, {}),
    ("dropout=0.1", {}, {"dropout": 0.1}),
    ("center_input_sample", {}, {"center_input_sample": True}),
]


@pytest.mark.parametrize(
    ("message", "ours", "theirs"), UNSUPPORTED, ids=[u[0] for u in UNSUPPORTED]
)
def test_features_without_a_layer_are_refused_by_name(
    message: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    controlnet = ControlNetModel(**{**TINY, **HINT, **ours})
    with pytest.raises(UnsupportedError, match=message):
        controlnet_components(controlnet, UNet2DConditionModel(**{**TINY, **theirs}), check=False)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("12 zero convolutions for 8 skips", {"layers_per_block": 2}),
        ("cross_attention_dim is 16 in the ControlNet and 8", {"cross_attention_dim": 16}),
    ],
)
def test_models_that_do_not_fit_each_other_are_refused(
    message: str, changes: dict[str, Any]
) -> None:
    controlnet = ControlNetModel(**{**TINY, **HINT, **changes})
    with pytest.raises(SpecError, match=message):
        controlnet_components(controlnet, UNet2DConditionModel(**TINY), check=False)


def test_a_hint_of_another_size_is_refused() -> None:
    model = build()
    _, backbone = controlnet_components(model.controlnet, model.unet)
    fields = fields_of() | {"hint": torch.randn(2, 3, 32, 32)}
    with pytest.raises(SpecError, match="embedded hint 4x4; give a hint of 8 times"):
        run_layers(Backbone(name="c", layers=backbone.layers[:3]).layers, fields)

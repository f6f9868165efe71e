"""PixArt, SD3 and Flux: their layers against the library's forward, whole and cut everywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.flux import flux_backbone, pack, position_ids, unpack
from lightning_dpipe.models.pixart import pixart_backbone
from lightning_dpipe.models.sd3 import sd3_backbone
from lightning_dpipe.models.spec import Backbone
from reference import run_once
from staged import bound, run_staged

BATCH, HEIGHT, WIDTH, WORDS = 3, 8, 4, 5
Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """How to build, cut and call one kind of model."""

    build: Callable[..., Any]
    backbone: Callable[..., Backbone]
    call: Callable[[Any, Fields], Tensor]
    fields: dict[str, tuple[int, ...]]
    out_channels: int


def pixart(**changes: Any) -> PixArtTransformer2DModel:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 8,
        "num_layers": 3, "sample_size": 8, "cross_attention_dim": 24, "caption_channels": 12,
    }  # fmt: skip
    return PixArtTransformer2DModel(**{**config, **changes})


def call_pixart(model: Any, f: Fields) -> Tensor:
    sizes = {"resolution": None, "aspect_ratio": None}
    if model.use_additional_conditions:
        sizes = {name: f[name] for name in sizes}
    made: Tensor = model(
        f["sample"],
        encoder_hidden_states=f["context"],
        timestep=f["timestep"],
        added_cond_kwargs=sizes,
        encoder_attention_mask=f.get("mask"),
        return_dict=False,
    )[0]
    return made


def sd3(**changes: Any) -> SD3Transformer2DModel:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "num_layers": 3, "sample_size": 8, "caption_projection_dim": 16, "joint_attention_dim": 12,
        "pooled_projection_dim": 6, "pos_embed_max_size": 8,
    }  # fmt: skip
    return SD3Transformer2DModel(**{**config, **changes})


def sd35(**changes: Any) -> SD3Transformer2DModel:
    return sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1), **changes)


def call_sd3(model: Any, f: Fields) -> Tensor:
    made: Tensor = model(
        f["sample"],
        encoder_hidden_states=f["context"],
        pooled_projections=f["pooled"],
        timestep=f["timestep"],
        return_dict=False,
    )[0]
    return made


def flux(**changes: Any) -> FluxTransformer2DModel:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 2,
        "num_single_layers": 2, "joint_attention_dim": 12, "pooled_projection_dim": 6,
        "guidance_embeds": True, "axes_dims_rope": (2, 2, 4),
    }  # fmt: skip
    return FluxTransformer2DModel(**{**config, **changes})


def call_flux(model: Any, f: Fields) -> Tensor:
    height, width = f["sample"].shape[-2:]
    ids = position_ids(WORDS, height, width, torch.device("cpu"))
    made: Tensor = model(
        pack(f["sample"]),
        encoder_hidden_states=f["context"],
        pooled_projections=f["pooled"],
        timestep=f["timestep"],
        guidance=f["guidance"] if model.config.guidance_embeds else None,
        txt_ids=ids[:WORDS],
        img_ids=ids[WORDS:],
        return_dict=False,
    )[0]
    return unpack(made, height, width)


TEXT = {"timestep": (), "context": (WORDS, 12)}
FAMILIES = {
    "pixart": Family(pixart, pixart_backbone, call_pixart, TEXT, 8),
    "sd3": Family(sd3, sd3_backbone, call_sd3, {**TEXT, "pooled": (6,)}, 4),
    "sd35": Family(sd35, sd3_backbone, call_sd3, {**TEXT, "pooled": (6,)}, 4),
    "flux": Family(flux, flux_backbone, call_flux, {**TEXT, "pooled": (6,), "guidance": ()}, 4),
}


def build(family: Family, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = family.build(**changes).train()
    with torch.no_grad():
        for weight in model.parameters():  # some start at zero, and would hide what is wrong
            weight.add_(0.02 * torch.randn_like(weight))
    return model


def fields_of(family: Family) -> Fields:
    torch.manual_seed(1)
    fields = {name: torch.rand(BATCH, *shape) for name, shape in family.fields.items()}
    fields["sample"] = torch.randn(BATCH, 4, HEIGHT, WIDTH)
    fields["cotangent"] = torch.randn(BATCH, family.out_channels, HEIGHT, WIDTH)
    return fields


def library(family: Family, model: Any, f: Fields) -> tuple[Tensor, Fields]:
    losses = (family.call(model, f) * f["cotangent"]).flatten(1).sum(1)
    losses.sum().backward()
    return losses.detach(), take_grads(model)


def take_grads(model: Any) -> Fields:
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {name: g for name, g in grads.items() if g is not None}


def differing(a: Fields, b: Fields) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_any_cut_is_bit_identical_to_the_library(family: Family) -> None:
    model, fields = build(family), fields_of(family)
    binding, graph = bound(family.backbone(model), fields)
    losses, grads = library(family, model, fields)
    assert losses.abs().min() > 0
    num_layers = len(graph.backbones[0].layers)
    cuts: list[tuple[int, ...]] = [(), *((i,) for i in range(1, num_layers))]
    for cut in (*cuts, (1, num_layers - 1), tuple(range(1, num_layers))):
        assert torch.equal(run_staged(binding, graph, cut, fields), losses), cut
        assert differing(take_grads(model), grads) == [], cut


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_accumulated_micro_batches_are_bit_identical_too(family: Family) -> None:
    model, fields = build(family), fields_of(family)
    binding, graph = bound(family.backbone(model), fields)
    parts = [{k: v[rows] for k, v in fields.items()} for rows in (slice(0, 2), slice(2, 3))]
    for part in parts:
        losses = (family.call(model, part) * part["cotangent"]).flatten(1).sum(1)
        losses.sum().backward()
    expected = take_grads(model)
    for part in parts:
        run_staged(binding, graph, (1, 3), part)
    assert differing(take_grads(model), expected) == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_weight_belongs_to_one_layer(family: Family) -> None:
    model = build(family)
    owned = [id(p) for layer in family.backbone(model).layers for p in layer.parameters()]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_self_conditioning_is_appended_to_the_samples_channels(family: Family) -> None:
    wide = {"in_channels": 32, "out_channels": 16} if family.build is flux else {"in_channels": 8}
    model, fields = build(family, **wide), fields_of(family)
    fields["self_cond"] = torch.randn(BATCH, 4, HEIGHT, WIDTH)
    binding, graph = bound(family.backbone(model, self_cond="self_cond"), fields)
    joined = {**fields, "sample": torch.cat([fields["sample"], fields["self_cond"]], 1)}
    losses, grads = library(family, model, joined)
    assert torch.equal(run_staged(binding, graph, (2,), fields), losses)
    assert differing(take_grads(model), grads) == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_gradient_checkpointing_and_hooks_are_refused(family: Family) -> None:
    model = build(family)
    model.enable_gradient_checkpointing()
    with pytest.raises(UnsupportedError, match="gradient checkpointing"):
        family.backbone(model)
    model = build(family)
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="hooks"):
        family.backbone(model)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_latent_that_does_not_divide_is_refused_with_both_numbers(family: Family) -> None:
    fields = fields_of(family)
    fields["sample"] = torch.randn(BATCH, 4, HEIGHT + 1, WIDTH)
    with pytest.raises(SpecError, match=r"9x4.*multiples of 2"):
        bound(family.backbone(build(family)), fields)


def test_pixart_masks_words_and_reads_sizes_at_1024_px() -> None:
    family = FAMILIES["pixart"]
    model, fields = build(family, use_additional_conditions=True), fields_of(family)
    fields["mask"] = (torch.rand(BATCH, WORDS) < 0.5).float()
    fields["resolution"] = torch.tensor([[64.0, 32.0]]).repeat(BATCH, 1)
    fields["aspect_ratio"] = torch.full((BATCH, 1), 2.0)
    binding, graph = bound(family.backbone(model, mask="mask"), fields)
    losses, grads = library(family, model, fields)
    assert torch.equal(run_staged(binding, graph, (1, 3), fields), losses)
    assert differing(take_grads(model), grads) == []
    unmasked = bound(family.backbone(model), fields)
    assert not torch.equal(run_staged(*unmasked, (), fields), losses)


def test_gated_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="attention_type='gated'"):
        pixart_backbone(build(FAMILIES["pixart"], attention_type="gated"))


def test_flux_without_guidance_reads_none() -> None:
    family = FAMILIES["flux"]
    model, fields = build(family, guidance_embeds=False), fields_of(family)
    binding, graph = bound(family.backbone(model), fields)
    losses, grads = library(family, model, fields)
    assert torch.equal(run_staged(binding, graph, (2,), fields), losses)
    assert differing(take_grads(model), grads) == []


def test_flux_tokens_and_positions_are_the_pipelines() -> None:
    from diffusers import FluxPipeline

    latent = torch.randn(2, 3, 6, 4)
    assert torch.equal(pack(latent), FluxPipeline._pack_latents(latent, 2, 3, 6, 4))
    assert torch.equal(unpack(pack(latent), 6, 4), latent)
    ids = FluxPipeline._prepare_latent_image_ids(2, 3, 2, torch.device("cpu"), torch.float32)
    assert torch.equal(position_ids(5, 6, 4, torch.device("cpu"))[5:], ids)


def test_flux_rotary_embeddings_are_made_once_a_size() -> None:
    family = FAMILIES["flux"]
    model, fields = build(family), fields_of(family)
    binding, graph = bound(family.backbone(model), fields)
    made: list[Tensor] = []
    model.pos_embed.register_forward_hook(lambda *call: made.append(call[1][0]))
    for _ in range(2):
        run_once(binding, graph, fields)
    assert [tuple(ids.shape) for ids in made] == [(WORDS + HEIGHT * WIDTH // 4, 3)]

"""The DiT's layers against the library's forward, whole and cut everywhere."""

from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.dit import dit_backbone, dit_layers
from reference import run_once
from staged import bound, run_staged

CONFIG: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 4,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
}


def build(**changes: Any) -> DiTTransformer2DModel:
    torch.manual_seed(0)
    return DiTTransformer2DModel(**{**CONFIG, **changes}).train()


def fields_of(channels: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "sample": torch.randn(3, channels, 8, 8),
        "timestep": torch.tensor([3, 700, 3]),
        "label": torch.tensor([1, 10, 1]),
        "cotangent": torch.randn(3, 8, 8, 8),
    }


def library_grads(model: Any, f: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(f["sample"], f["timestep"], f["label"], return_dict=False)[0]
    losses = (out * f["cotangent"]).flatten(1).sum(1)
    losses.sum().backward()
    return losses.detach(), take_grads(model)


def take_grads(model: torch.nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {name: g for name, g in grads.items() if g is not None}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_any_cut_is_bit_identical_to_the_library_in_train_mode() -> None:
    model, fields = build(), fields_of()
    binding, graph = bound(dit_backbone(model), fields)
    losses, grads = library_grads(model, fields)
    assert len(grads) == len(list(model.parameters()))
    num_layers = len(graph.backbones[0].layers)
    assert num_layers == 6
    for cuts in ((), (1,), (2,), (3,), (4,), (5,), (2, 4), tuple(range(1, num_layers))):
        assert torch.equal(run_staged(binding, graph, cuts, fields), losses), cuts
        assert differing(take_grads(model), grads) == [], cuts


def test_accumulated_micro_batches_are_bit_identical_too() -> None:
    # The embedder that block 0 and the head share gets two contributions per backward.
    model, fields = build(), fields_of()
    binding, graph = bound(dit_backbone(model), fields)
    parts = [{k: v[rows] for k, v in fields.items()} for rows in (slice(0, 2), slice(2, 3))]
    for part in parts:
        out = model(part["sample"], part["timestep"], part["label"], return_dict=False)[0]
        (out * part["cotangent"]).flatten(1).sum(1).sum().backward()
    expected = take_grads(model)
    for part in parts:
        run_staged(binding, graph, (1, 3), part)
    assert differing(take_grads(model), expected) == []


def test_values_are_contiguous_as_the_buffers_they_cross_cuts_in() -> None:
    fields = fields_of()
    binding, graph = bound(dit_backbone(build()), fields)
    assert all(t.is_contiguous() for t in run_once(binding, graph, fields).values())


def test_the_embedder_that_the_head_shares_belongs_to_block0_alone() -> None:
    model = build()
    layers = dit_layers(model)
    owned = [id(p) for layer in layers for p in layer.parameters()]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    shared = {id(p) for p in model.transformer_blocks[0].norm1.emb.parameters()}
    assert [x.name for x in layers if shared & {id(p) for p in x.parameters()}] == ["block0"]


def test_labels_are_never_dropped_inside_the_blocks() -> None:
    model = build()
    _, graph = bound(dit_backbone(model), fields_of())
    assert not any(layer.random for layer in graph.backbones[0].layers)
    model.transformer_blocks[2].norm1.emb.class_embedder.dropout_prob = 0.1
    backbone = dit_backbone(model)
    model.transformer_blocks[2].norm1.emb.class_embedder.dropout_prob = 0.1
    _, graph = bound(backbone, fields_of())
    assert [x.name for x in graph.backbones[0].layers if x.random] == ["block2"]


def test_self_conditioning_is_appended_to_the_samples_channels() -> None:
    model, fields = build(in_channels=8), fields_of(4)
    fields["self_cond"] = torch.randn(3, 4, 8, 8)
    binding, graph = bound(dit_backbone(model, self_cond="self_cond"), fields)
    joined = {**fields, "sample": torch.cat([fields["sample"], fields["self_cond"]], 1)}
    losses, grads = library_grads(model, joined)
    assert torch.equal(run_staged(binding, graph, (2,), fields), losses)
    assert differing(take_grads(model), grads) == []


def test_gradient_checkpointing_and_hooks_are_refused_by_name() -> None:
    model = build()
    model.enable_gradient_checkpointing()
    with pytest.raises(UnsupportedError, match="gradient checkpointing"):
        dit_layers(model)
    model = build()
    model.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"the DiT .* has hooks"):
        dit_layers(model)


def test_latents_that_are_not_square_are_refused() -> None:
    fields = fields_of()
    fields["sample"] = torch.randn(3, 4, 8, 16)
    with pytest.raises(SpecError, match="the latent is 8x16; this DiT's head"):
        bound(dit_backbone(build()), fields)

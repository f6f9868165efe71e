"""The families of the recipes on a real pipeline against the library's own forward, bit for bit."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.models.controlnet import ControlledUNet
from lightning_dpipe.models.flux import pack, position_ids, unpack
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Backbone, Layer, PipelineSpec
from parity import reference
from pipeline import gather_gradients, make_plan, run_pipeline
from recipe import batch_of, built

NUM_MICROBATCHES = 2


@dataclass(frozen=True)
class Family:
    """A tiny recipe, its trained module, and how the library is called on what it reads."""

    recipe: str
    part: str
    reads: tuple[str, ...]
    call: Callable[..., Tensor]
    overrides: tuple[str, ...] = ()
    locked: str | None = None


@dataclass(frozen=True)
class Library:
    """The whole model as one layer: its own forward."""

    model: nn.Module
    locked: nn.Module | None
    call: Callable[..., Tensor]

    def __call__(self, *reads: Tensor) -> Tensor:
        models = (self.model,) if self.locked is None else (self.model, self.locked)
        return self.call(*models, *reads)


def unet(model: Any, noisy: Tensor, t: Tensor, context: Tensor, *estimate: Tensor) -> Tensor:
    return model(torch.cat([noisy, *estimate], dim=1), t, context).sample


def controlled(copy: Any, locked: Any, *reads: Tensor) -> Tensor:
    return ControlledUNet(copy, locked)(*reads)


def dit(model: Any, noisy: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return model(noisy, timestep=t, class_labels=label).sample


def pixart(model: Any, noisy: Tensor, t: Tensor, context: Tensor, mask: Tensor) -> Tensor:
    return model(
        noisy,
        encoder_hidden_states=context,
        encoder_attention_mask=mask,
        timestep=t,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample


def sd3(model: Any, noisy: Tensor, t: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
    return model(noisy, encoder_hidden_states=context, pooled_projections=pooled, timestep=t).sample


def flux(
    model: Any, noisy: Tensor, t: Tensor, context: Tensor, pooled: Tensor, guidance: Tensor
) -> Tensor:
    height, width, words = *noisy.shape[-2:], context.shape[1]
    ids = position_ids(words, height, width, noisy.device)
    tokens = model(
        pack(noisy),
        encoder_hidden_states=context,
        pooled_projections=pooled,
        timestep=t / 1000,
        guidance=guidance,
        txt_ids=ids[:words],
        img_ids=ids[words:],
    ).sample
    return unpack(tokens, height, width)


BASE = ("noisy", "timestep")
CAPTION = (*BASE, "context")
FAMILIES = {
    "sd21": Family("sd21_tiny", "unet", CAPTION, unet),
    "sd21_selfcond": Family(
        "sd21_tiny", "unet", (*CAPTION, "estimate"), unet, ("model.self_conditioning=0.5",)
    ),
    "controlnet": Family(
        "controlnet_tiny", "controlnet", (*CAPTION, "hint"), controlled, locked="unet"
    ),
    "dit": Family("dit_tiny", "transformer", (*BASE, "class_label"), dit),
    "pixart": Family("pixart_tiny", "transformer", (*CAPTION, "caption_attention_mask"), pixart),
    "sd3": Family("sd3_tiny", "transformer", (*CAPTION, "pooled"), sd3),
    "flux": Family("flux_tiny", "transformer", (*CAPTION, "pooled", "guidance"), flux),
}


def library_spec(family: Family, module: Any) -> PipelineSpec:
    """The same problem with the library's model as its only trained layer."""
    model = getattr(module, family.part)
    locked = None if family.locked is None else getattr(module, family.locked)
    layer = Layer(
        name="forward",
        module=Library(model, locked, family.call),
        reads=family.reads,
        writes=("out",),
        owns=(model,) if locked is None else (model, locked),
    )
    return replace(
        module.spec,
        frozen=tuple(c for c in module.spec.frozen if c.name != "locked"),
        backbones=(Backbone(name="library", layers=(layer,)),),
    )


def names_in_library(spec: PipelineSpec, theirs: PipelineSpec) -> dict[str, str]:
    """The name of each trained weight in one spec by its name in the other."""
    weights = theirs.backbones[0].layers[0].parameters()
    place = {id(p): f"library.forward.{i}" for i, p in enumerate(weights)}
    (backbone,) = spec.backbones
    return {
        f"{backbone.name}.{layer.name}.{i}": place[id(p)]
        for layer in backbone.layers
        for i, p in enumerate(layer.parameters())
        if p.requires_grad
    }


@functools.cache
def traced(family: Family) -> tuple[Any, ModelGraph]:
    """The family's module, which no test changes, and its graph."""
    module = built(family.recipe, *family.overrides, jitter=0.02)
    return module, trace(module.spec)


@pytest.mark.parametrize("stages", [1, 2, None], ids=["1 stage", "2 stages", "a layer each"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_loss_and_gradients_are_the_librarys(family: Family, stages: int | None) -> None:
    module, graph = traced(family)
    spec = module.spec
    num_layers = len(spec.backbones[0].layers)
    stages = stages or num_layers
    rows, count = (1 if stages > 2 else 4 // stages), NUM_MICROBATCHES
    if family.locked is not None:
        # The locked encoder runs ahead on a rank's batch, the library's on a micro-batch: kernels
        # give the same bits only if both are equally large.
        rows, count = (2 if stages == 1 else 1), stages
    cuts = [i * num_layers // stages for i in range(1, stages)]
    plan = make_plan(graph, cuts, num_microbatches=count, batch_size=rows)
    fields = batch_of(family.recipe, stages * rows)
    ranks = [{n: t[r * rows : (r + 1) * rows] for n, t in fields.items()} for r in range(stages)]
    coins = (True,) if spec.self_conditioning is not None else None
    outcomes = run_pipeline(lambda: spec, plan, [ranks], coins=coins, graph=graph)
    theirs = library_spec(family, module)
    (loss,), wanted = reference(lambda: theirs, plan, [ranks], coins=coins)
    assert sum(o.loss_sums[0] for o in outcomes) == pytest.approx(loss, rel=1e-6)
    found, names = gather_gradients(plan, outcomes), names_in_library(spec, theirs)
    assert set(names.values()) == wanted.keys()
    assert found.keys() == names.keys()
    # The last block of SD3 has weights for text that nothing reads.
    assert sum(bool(grad.any()) for grad in wanted.values()) > 0.9 * len(wanted)
    for name, theirs_name in names.items():
        assert torch.equal(found[name], wanted[theirs_name]), name


def test_ten_steps_of_a_fresh_controlnet_move_its_zero_convolutions_and_never_the_unet() -> None:
    """The copy's weights follow once zero convolutions are not zero: that is the second step."""
    module = built("controlnet_tiny")
    zeros = ("controlnet_down_blocks", "controlnet_mid_block")
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0
    )
    module.train()
    graph = trace(module.spec)
    plan = make_plan(graph, (9,), num_microbatches=2, batch_size=2)

    def moved() -> set[str]:
        return {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}

    for step in range(10):
        fields = batch_of("controlnet_tiny", 4, batch=step)
        ranks = [{n: t[r::2] for n, t in fields.items()} for r in range(2)]
        outcomes = run_pipeline(lambda: module.spec, plan, [ranks], graph=graph)
        found = gather_gradients(plan, outcomes)
        for layer in module.spec.backbones[0].layers:
            for i, p in enumerate(layer.parameters()):
                if p.requires_grad:
                    p.grad = found[f"controlnet.{layer.name}.{i}"]
        optimizer.step()
        names = {n.removeprefix("controlnet.") for n in moved()}
        if step == 0:
            assert names
            assert all(n.startswith(zeros) for n in names)
    assert all(n.startswith("controlnet.") for n in moved())
    assert {n for n in before if n.startswith(tuple(f"controlnet.{z}" for z in zeros))} <= moved()
    assert any("conv_in" in n for n in moved())
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers())

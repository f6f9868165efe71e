"""What is known to go wrong when patches are sampled over stages: work done twice or not at all."""

import copy
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.sampling.plan import SamplingPlan
from lightning_dpipe.sampling.rows import backbone_of, row_model
from lightning_dpipe.sampling.sampler import sample
from sampled import (
    CASES,
    STALE,
    STEPS,
    WORDS,
    Case,
    ddim,
    draw,
    drawn,
    model_of,
    options_of,
    sites,
    stages_of,
)
from stale import stale


class Counted:
    """Counts the tokens that go through modules, by name."""

    def __init__(self, **modules: nn.Module) -> None:
        self.tokens = dict.fromkeys(modules, 0)
        self.calls = dict.fromkeys(modules, 0)
        self.modules = modules

    def __enter__(self) -> "Counted":
        # Around `forward`: the layer list refuses modules with hooks.
        for name, module in self.modules.items():
            module.forward = self._counting(name, module.forward)  # type: ignore[method-assign]
        return self

    def __exit__(self, *failure: object) -> None:
        for module in self.modules.values():
            del module.forward

    def _counting(self, name: str, forward: Any) -> Any:
        def counted(x: Tensor, *args: Any, **more: Any) -> Any:
            self.calls[name] += 1
            self.tokens[name] += x.shape[0] * x.shape[1]
            return forward(x, *args, **more)

        return counted


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_text_goes_through_its_feed_forward_once_a_step(name: str) -> None:
    case, model = CASES[name], model_of(name)
    first = model.transformer_blocks[0]
    branches = 2 if case.guided else 1
    with Counted(
        text=first.ff_context, image=first.ff, words=model.context_embedder,
        key=first.attn.add_k_proj,
    ) as counted:  # fmt: skip
        drawn(case, case.request(), ranks=2, **STALE)
    assert counted.tokens["text"] == STEPS * WORDS * branches
    assert counted.tokens["key"] == STEPS * WORDS * branches
    assert counted.tokens["image"] == STEPS * 24 * branches
    assert counted.calls["words"] == 1


def test_pixart_projects_the_caption_once_a_call_and_embeds_times_once_a_step() -> None:
    case, model = CASES["pixart"], model_of("pixart")
    block = model.transformer_blocks[2]
    time = model.adaln_single.emb.timestep_embedder
    with Counted(
        caption=model.caption_projection, key=block.attn2.to_k, value=block.attn2.to_v,
        image=block.attn1.to_k, time=time,
    ) as counted:  # fmt: skip
        drawn(case, case.request(), ranks=2, **STALE)
    assert counted.calls == {
        "caption": 1, "key": 1, "value": 1, "image": 1 + 3 * (STEPS - 1), "time": STEPS
    }  # fmt: skip
    assert counted.tokens["image"] == 2 * STEPS * 24


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stages_without_a_training_plan_share_the_blocks(case: Case) -> None:
    conditions = case.request().conditions
    layers = row_model(backbone_of(model_of(case.name), conditions), conditions).layers
    for count in (1, 2, 4):
        stages = stages_of(model_of(case.name), case.request(), count)
        blocks = [sum(bool(x.sites) for x in layers[a:b]) for a, b in stages]
        assert blocks == [4 // count] * count


def test_every_block_runs_once_a_unit_however_the_stages_are_cut() -> None:
    case, model = CASES["dit"], model_of("dit")
    blocks = {f"b{i}": block for i, block in enumerate(model.transformer_blocks)}
    for stages in (((0, 6),), ((0, 1), (1, 5), (5, 6)), ((0, 2), (2, 3), (3, 6))):
        plan = SamplingPlan(stages=stages, ranks=(0,) * len(stages), **STALE)
        with Counted(**blocks) as counted:
            sample(model, ddim(), case.request(), plan)
        assert set(counted.calls.values()) == {1 + 3 * (STEPS - 1)}


class LowRank(nn.Module):
    """A projection with a low-rank update, as PEFT puts in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.up(self.down(x))
        return made


@pytest.mark.parametrize("name", ["pixart", "sd35", "flux"])
def test_low_rank_updates_of_projections_count(name: str) -> None:
    case, plain = CASES[name], drawn(CASES[name], CASES[name].request(), **STALE)
    model, request = copy.deepcopy(model_of(name)), case.request()
    torch.manual_seed(3)
    for module in sites(model):
        module.to_q, module.to_k = LowRank(module.to_q), LowRank(module.to_k)
    names = [*model.state_dict()]
    make, options = case.schedulers[0], options_of(case, request)
    expected = stale(name, model, make(), request, cuts=(0, 2, 4, 6), warmup=1, options=options)
    found = draw(model, make(), request, ranks=2, options=options, **STALE)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)
    assert [*model.state_dict()] == names


def test_compiled_blocks_draw_the_same() -> None:
    case, request = CASES["dit"], CASES["dit"].request()
    model = copy.deepcopy(model_of("dit"))
    for block in model.transformer_blocks[:2]:
        block.compile(backend="eager")
    for plan in ({}, STALE):
        torch.testing.assert_close(
            draw(model, ddim(), request, **plan), drawn(case, request, **plan),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip


def test_a_changed_processor_is_refused_on_patches_and_used_exactly() -> None:
    case, request = CASES["dit"], CASES["dit"].request()
    model = copy.deepcopy(model_of("dit"))
    model.transformer_blocks[1].attn1.set_processor(AttnProcessor())
    with pytest.raises(UnsupportedError, match="attention processor AttnProcessor in a Attention"):
        draw(model, ddim(), request, **STALE)
    expected = case.library(model, ddim(), request, {})
    assert torch.equal(draw(model, ddim(), request, ranks=2), expected)


def test_a_u_net_whose_skips_would_travel_is_refused() -> None:
    unet = UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=2, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    request, plan = CASES["dit"].request(), SamplingPlan(stages=((0, 6),))
    with pytest.raises(UnsupportedError, match="Skips of a U-Net would travel"):
        sample(unet_backbone(unet), ddim(), request, plan)
    with pytest.raises(UnsupportedError, match="DiT, PixArt, SD3 and Flux can"):
        sample(unet, ddim(), request, plan)

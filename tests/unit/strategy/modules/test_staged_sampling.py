"""A trained module is sampled over stages as it is: its spec, its names, its self-conditioning."""

import dataclasses
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.sampling.plan import SamplingPlan
from lightning_dpipe.sampling.sampler import sample
from lightning_dpipe.sampling.simple import Guidance, SampleRequest, backbone_denoiser
from lightning_dpipe.sampling.simple import sample as sample_simply
from lightning_dpipe.strategy.modules.class_conditional import ClassConditional
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig
from sampled import draw, shaken

STALE: dict[str, Any] = {"mode": "pipefusion", "patches": (0, 1, 4)}


def module(**changes: Any) -> ClassConditional:
    torch.manual_seed(0)
    made = ClassConditional(
        dit={
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 2, "out_channels": 2,
            "num_layers": 3, "sample_size": 8, "num_embeds_ada_norm": 5,
        },
        scheduler=DDPMScheduler(prediction_type="v_prediction"),
        optimizer=AdamWConfig(),
        seed=3,
        **changes,
    )  # fmt: skip
    made.configure_model()
    shaken(made.dit)
    return made


def request_of(made: ClassConditional, **changes: Any) -> SampleRequest:
    torch.manual_seed(1)
    asked = SampleRequest(
        noise=torch.randn(3, *made.image_shape),
        num_steps=4,
        conditions={"class_label": torch.tensor([0, 4, 2])},
        self_conditioning=made.spec.self_conditioning,
    )
    return dataclasses.replace(asked, **changes)


def simply(made: ClassConditional, asked: SampleRequest) -> Tensor:
    scheduler = DDIMScheduler.from_config(made.scheduler.config)
    return sample_simply(backbone_denoiser(made.spec.backbones[0]), scheduler, asked)


@pytest.mark.parametrize("self_conditioning", [None, 0.5])
def test_a_module_s_exact_samples_are_those_of_one_process(self_conditioning: Any) -> None:
    made = module(self_conditioning=self_conditioning)
    scheduler = DDIMScheduler.from_config(made.scheduler.config)
    asked = request_of(made)
    for ranks in (1, 2):
        assert torch.equal(draw(made, scheduler, asked, ranks=ranks), simply(made, asked))
    guidance = Guidance(scale=2.0, unconditional={"class_label": torch.full((3,), 5)})
    asked = request_of(made, guidance=guidance)
    torch.testing.assert_close(draw(made, scheduler, asked, ranks=2), simply(made, asked))


def test_estimates_are_fed_back_by_patch() -> None:
    made = module()
    scheduler = DDIMScheduler.from_config(made.scheduler.config)
    asked = request_of(made)
    stale = draw(made, scheduler, asked, **STALE)
    exact = simply(made, asked)
    assert torch.equal(draw(made, scheduler, asked, **STALE, warmup=4), exact)
    assert 0 < (stale - exact).norm() < 0.2 * exact.norm()
    for plan in ({"ranks": 2}, {"ranks": 3}, {"ranks": 2, "stages": 4}):
        assert torch.equal(draw(made, scheduler, asked, **plan, **STALE), stale)
    blind = draw(made, scheduler, request_of(made, self_conditioning=None), **STALE)
    assert not torch.equal(blind, stale)


def test_a_module_s_backbone_may_be_given_and_its_stages_are_the_training_plan_s() -> None:
    made = module(self_conditioning=None)
    asked = request_of(made)
    layers = [layer.name for layer in made.spec.backbones[0].layers]
    assert layers == ["patch_embed", "block0", "block1", "block2", "head"]
    plan = SamplingPlan(stages=((0, 2), (2, 5)), ranks=(0, 0))
    scheduler = DDIMScheduler.from_config(made.scheduler.config)
    found = sample(made.spec.backbones[0], scheduler, asked, plan)
    assert found is not None
    assert torch.equal(found, simply(made, asked))


def test_self_conditioning_of_a_model_that_reads_none_is_refused() -> None:
    made, plain = module(), module(self_conditioning=None)
    asked = request_of(plain, self_conditioning=made.spec.self_conditioning)
    with pytest.raises(SpecError, match="reads no estimate"):
        draw(plain, DDIMScheduler(), asked)

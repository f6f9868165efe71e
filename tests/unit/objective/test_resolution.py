"""The time shift by resolution against diffusers' own scheduler."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.objective.draws import normal
from lightning_dpipe.objective.noise import TimestepDensity, noise_component
from lightning_dpipe.objective.resolution import ResolutionShift
from lightning_dpipe.objective.schedule import NoiseSchedule


def flow(**changes: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **changes)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("side", [32, 64, 128])
def test_the_tables_are_what_the_scheduler_steps_through(side: int, kind: str) -> None:
    scheduler = flow(time_shift_type=kind)
    shift = ResolutionShift.from_scheduler(scheduler, patch=2)
    assert shift is not None
    tokens = (side // 2) * (side // 2)
    mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    assert shift.mu(shift.num_tokens((1, 4, side, side))) == pytest.approx(mu, rel=1e-12)
    found = shift.schedule(NoiseSchedule.from_scheduler(scheduler), (1, 4, side, side))
    scheduler.set_timesteps(1000, sigmas=np.linspace(1.0, 1 / 1000, 1000), mu=mu)
    torch.testing.assert_close(torch.tensor(found.sigma), scheduler.sigmas[:-1], rtol=1e-5, atol=0)
    timesteps = torch.tensor(found.timesteps)
    torch.testing.assert_close(timesteps, scheduler.timesteps, rtol=1e-5, atol=0)
    assert (found.signal == 1 - found.sigma).all()
    assert shift.schedule(found, (side, side)) is found  # made once a size


def test_schedulers_that_do_not_ask_for_it_have_none() -> None:
    assert ResolutionShift.from_scheduler(FlowMatchEulerDiscreteScheduler(shift=3.0), 2) is None
    assert ResolutionShift.from_scheduler(DDPMScheduler(), 2) is None


def test_larger_latents_are_noised_more_by_the_draws_of_smaller_ones() -> None:
    scheduler = flow()
    schedule = NoiseSchedule.from_scheduler(scheduler)
    component = noise_component(
        schedule,
        seed=0,
        density=TimestepDensity.LOGIT_NORMAL,
        shift=ResolutionShift.from_scheduler(scheduler, 2),
    )
    (layer,) = component.layers
    key = torch.tensor([[0, slot] for slot in range(50)])
    named = {}
    for side in (8, 32):
        latents = torch.randn(50, 1, side, side)
        out = layer.module(*({"latents": latents, DRAW_KEY: key}[n] for n in layer.reads))
        named[side] = dict(zip(layer.writes, out, strict=True))
        noise = normal(0, "noise", key, (1, side, side))
        sigma = (named[side]["timestep"] / 1000)[:, None, None, None]
        mixed = (1 - sigma) * latents + sigma * noise
        torch.testing.assert_close(named[side]["noisy"], mixed, rtol=0, atol=1e-5)
        assert torch.equal(named[side]["target"], noise - latents)
    assert (named[32]["timestep"] >= named[8]["timestep"]).all()
    assert (named[32]["timestep"] > named[8]["timestep"]).any()

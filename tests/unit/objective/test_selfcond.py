"""The estimate that self-conditioning feeds back."""

import torch
from diffusers import DDPMScheduler

from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.objective.selfcond import CleanEstimate, self_conditioning


def test_the_estimate_equals_the_schedulers_own_predicted_sample() -> None:
    for prediction in ("epsilon", "sample", "v_prediction"):
        scheduler = DDPMScheduler(prediction_type=prediction, clip_sample=True)
        estimate = CleanEstimate(schedule=NoiseSchedule.from_scheduler(scheduler))
        out, noisy = torch.randn(2, 3, 2, 4, 4)
        for t in (0, 10, 500, 999):
            expected = scheduler.step(out, t, noisy).pred_original_sample
            torch.testing.assert_close(
                estimate(out, noisy, torch.full((3,), t)), expected, rtol=1e-4, atol=1e-4
            )


def test_a_learned_variance_half_is_dropped_first() -> None:
    estimate = CleanEstimate(schedule=NoiseSchedule.from_scheduler(DDPMScheduler()))
    out, noisy, t = torch.randn(2, 8, 4, 4), torch.randn(2, 4, 4, 4), torch.tensor([3, 700])
    assert torch.equal(estimate(out, noisy, t), estimate(out[:, :4], noisy, t))


def test_the_estimate_is_bounded_finite_and_carries_no_gradient() -> None:
    scheduler = DDPMScheduler(rescale_betas_zero_snr=True)
    estimate = CleanEstimate(schedule=NoiseSchedule.from_scheduler(scheduler), clamp=2.0)
    out = torch.randn(4, 3, requires_grad=True)
    x0 = estimate(out, torch.randn(4, 3), torch.tensor([0, 10, 990, 999]))
    assert x0.isfinite().all()
    assert x0.abs().max() <= 2.0
    assert not x0.requires_grad


def test_the_description_names_what_the_engine_needs() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    described = self_conditioning(schedule, shape=(1, 8, 8), probability=0.25)
    assert described.writes == "estimate"
    assert described.reads == ("out", "noisy", "timestep")
    assert (described.shape, described.probability) == ((1, 8, 8), 0.25)
    out = described.estimate(*torch.randn(2, 2, 1, 8, 8), torch.tensor([5, 6]))
    assert out.shape == (2, 1, 8, 8)

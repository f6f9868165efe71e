"""Per-sample losses and min-SNR weights against their definitions."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_snr

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.objective.losses import drop_learned_sigma, min_snr_weights, weighted_mse
from lightning_dpipe.objective.schedule import NoiseSchedule


def test_the_loss_of_a_sample_is_its_weighted_mean_squared_error() -> None:
    out, target = torch.randn(2, 5, 3, 4, 4)
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.5])
    loss = weighted_mse(out, target, weight)
    for i in range(5):
        expected = torch.nn.functional.mse_loss(out[i], target[i]) * weight[i]
        torch.testing.assert_close(loss[i], expected)


def test_the_loss_is_computed_in_float32() -> None:
    out = torch.full((2, 1, 4), 1.0, dtype=torch.bfloat16)
    target = torch.full((2, 1, 4), 1.001)
    loss = weighted_mse(out, target, torch.ones(2))
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, torch.full((2,), 1e-6), rtol=1e-2, atol=0.0)


def test_a_learned_variance_half_has_no_part_in_the_loss() -> None:
    out, target = torch.randn(2, 8, 4, 4), torch.randn(2, 4, 4, 4)
    ones = torch.ones(2)
    assert torch.equal(weighted_mse(out, target, ones), weighted_mse(out[:, :4], target, ones))
    with pytest.raises(SpecError, match="6 channels for latents with 4"):
        drop_learned_sigma(torch.zeros(1, 6), 4)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weights_follow_diffusers_training_script(prediction: str) -> None:
    scheduler = DDPMScheduler(prediction_type=prediction)
    snr = compute_snr(scheduler, torch.arange(1000)).double()
    divisor = snr if prediction == "epsilon" else snr + 1
    expected = snr.clamp(max=5.0) / divisor
    weights = min_snr_weights(NoiseSchedule.from_scheduler(scheduler), 5.0)
    np.testing.assert_allclose(weights, expected.numpy(), rtol=1e-4)


@pytest.mark.parametrize(
    ("prediction", "terminal"), [("epsilon", 1.0), ("v_prediction", 0.0), ("sample", 0.0)]
)
def test_min_snr_is_finite_at_zero_terminal_snr(prediction: str, terminal: float) -> None:
    scheduler = DDPMScheduler(prediction_type=prediction, rescale_betas_zero_snr=True)
    weights = min_snr_weights(NoiseSchedule.from_scheduler(scheduler), 5.0)
    assert np.isfinite(weights).all()
    assert weights[-1] == terminal


def test_min_snr_refuses_flows_and_nonsense() -> None:
    flow = NoiseSchedule.from_scheduler(FlowMatchEulerDiscreteScheduler())
    with pytest.raises(UnsupportedError, match="flow matching"):
        min_snr_weights(flow, 5.0)
    with pytest.raises(SpecError, match="gamma is 0"):
        min_snr_weights(NoiseSchedule.from_scheduler(DDPMScheduler()), 0)

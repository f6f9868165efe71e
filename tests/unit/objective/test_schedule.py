"""The tables against diffusers' own schedulers, bit for bit."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    KarrasVeScheduler,
)

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.objective.schedule import NoiseSchedule, Prediction

DDPM_CONFIGS = [
    {"beta_schedule": "linear"},
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    {"beta_schedule": "squaredcos_cap_v2"},
    {"beta_schedule": "scaled_linear", "rescale_betas_zero_snr": True},
    {"num_train_timesteps": 100},
]


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(2, 100, 3, 4, 4, generator=generator)
    return x0, noise


@pytest.mark.parametrize("config", DDPM_CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_noisy_samples_and_targets_equal_ddpms(config: dict[str, object], prediction: str) -> None:
    scheduler = DDPMScheduler(**config, prediction_type=prediction)
    schedule = NoiseSchedule.from_scheduler(scheduler)
    x0, noise = pair()
    index = torch.linspace(0, schedule.num_steps - 1, 100).long()
    target = {
        "epsilon": noise,
        "sample": x0,
        "v_prediction": scheduler.get_velocity(x0, noise, index),
    }[prediction]
    assert torch.equal(schedule.add_noise(x0, noise, index), scheduler.add_noise(x0, noise, index))
    assert torch.equal(schedule.target(x0, noise, index), target)
    assert torch.equal(schedule.timestep(index), index)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_noisy_samples_equal_flow_matchings(shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    schedule = NoiseSchedule.from_scheduler(scheduler)
    x0, noise = pair()
    index = torch.linspace(0, 999, 100).long()
    timestep = schedule.timestep(index)
    assert torch.equal(timestep, scheduler.timesteps[index])
    assert torch.equal(
        schedule.add_noise(x0, noise, index), scheduler.scale_noise(x0, timestep, noise)
    )
    assert torch.equal(schedule.target(x0, noise, index), noise - x0)


def test_inference_timesteps_set_on_the_scheduler_do_not_change_training() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    fresh = NoiseSchedule.from_scheduler(scheduler)
    scheduler.set_timesteps(4)
    used = NoiseSchedule.from_scheduler(scheduler)
    assert used.num_steps == 1000
    assert (used.sigma == fresh.sigma).all()


@pytest.mark.parametrize("scheduler", [DDIMScheduler(), EulerDiscreteScheduler()])
def test_other_members_of_ddpms_family_share_its_tables(scheduler: object) -> None:
    assert (
        NoiseSchedule.from_scheduler(scheduler).signal
        == NoiseSchedule.from_scheduler(DDPMScheduler()).signal
    ).all()


@pytest.mark.parametrize("prediction", list(Prediction))
def test_the_estimate_of_a_perfect_output_is_the_clean_sample(prediction: Prediction) -> None:
    if prediction is Prediction.FLOW:
        scheduler: object = FlowMatchEulerDiscreteScheduler(shift=3.0)
    else:
        scheduler = DDPMScheduler(prediction_type=prediction.value)
    schedule = NoiseSchedule.from_scheduler(scheduler)
    x0, noise = (tensor.double() for tensor in pair())
    index = torch.linspace(0, 800, 100).long()
    noisy, target = schedule.add_noise(x0, noise, index), schedule.target(x0, noise, index)
    estimate = schedule.estimate(target, noisy, schedule.timestep(index))
    torch.testing.assert_close(estimate, x0, rtol=1e-4, atol=1e-4)


def test_the_estimate_stays_finite_where_the_signal_is_zero() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler(rescale_betas_zero_snr=True))
    assert schedule.signal[-1] == 0
    last = torch.tensor([999])
    for out in (torch.zeros(1, 3), torch.ones(1, 3)):
        assert schedule.estimate(out, torch.zeros(1, 3), last).isfinite().all()


def test_unknown_schedulers_and_predictions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="KarrasVeScheduler has neither"):
        NoiseSchedule.from_scheduler(KarrasVeScheduler())
    with pytest.raises(UnsupportedError, match="prediction_type is 'x_start'"):
        NoiseSchedule.from_scheduler(DDPMScheduler(prediction_type="x_start"))


def test_an_override_of_the_prediction_that_disagrees_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = DDPMScheduler(prediction_type="epsilon")
    same = NoiseSchedule.from_scheduler(scheduler, prediction="epsilon")
    assert same.prediction is Prediction.EPSILON
    assert not caplog.records
    other = NoiseSchedule.from_scheduler(scheduler, prediction="v_prediction")
    assert other.prediction is Prediction.V
    assert "predict v_prediction, but its scheduler is configured for epsilon" in caplog.text
    x0, noise, index = torch.randn(2, 3), torch.randn(2, 3), torch.tensor([10, 900])
    v = DDPMScheduler(prediction_type="v_prediction").get_velocity(x0, noise, index)
    assert torch.equal(other.target(x0, noise, index), v)
    with pytest.raises(UnsupportedError, match="prediction_type is 'x_start'"):
        NoiseSchedule.from_scheduler(scheduler, prediction="x_start")
    with pytest.raises(UnsupportedError, match="whose models predict 'flow_prediction'"):
        NoiseSchedule.from_scheduler(FlowMatchEulerDiscreteScheduler(), prediction="epsilon")

"""The noise component: the training pair it writes, and what it depends on."""

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import DRAW_KEY, FrozenComponent
from lightning_dpipe.objective.draws import NUM_LEVELS, at_level, integers, levels, normal
from lightning_dpipe.objective.losses import min_snr_weights
from lightning_dpipe.objective.noise import TimestepDensity, noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule


def keys(batch: int, slots: int) -> torch.Tensor:
    return torch.tensor([(batch, slot) for slot in range(slots)])


def run(component: FrozenComponent, latents: torch.Tensor, key: torch.Tensor) -> dict:
    (layer,) = component.layers
    assert layer.reads == ("latents", DRAW_KEY)
    return dict(zip(layer.writes, layer.module(latents, key), strict=True))


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_the_pair_is_diffusers_for_the_drawn_noise_and_timestep(prediction: str) -> None:
    scheduler = DDPMScheduler(prediction_type=prediction)
    component = noise_component(NoiseSchedule.from_scheduler(scheduler), seed=3)
    latents, key = torch.randn(6, 2, 4, 4), keys(5, 6)
    noise, t = normal(3, "noise", key, (2, 4, 4)), integers(3, "timestep", key, 1000)
    written = run(component, latents, key)
    velocity = scheduler.get_velocity(latents, noise, t)
    target = {"epsilon": noise, "sample": latents, "v_prediction": velocity}[prediction]
    assert torch.equal(written["timestep"], t)
    assert torch.equal(written["noisy"], scheduler.add_noise(latents, noise, t))
    assert torch.equal(written["target"], target)
    assert torch.equal(written["weight"], torch.ones(6))


def test_nothing_written_shares_memory_with_the_latents() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler(prediction_type="sample"))
    latents = torch.randn(2, 3)
    written = run(noise_component(schedule, seed=0), latents, keys(0, 2))
    assert written["target"].data_ptr() != latents.data_ptr()


def test_the_components_of_a_cascade_write_apart_and_draw_apart() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    one = noise_component(schedule, seed=0)
    other = noise_component(schedule, seed=0, name="fine_noise", prefix="fine_")
    latents, key = torch.randn(6, 2, 3, 3), keys(0, 6)
    first, second = run(one, latents, key), run(other, latents, key)
    assert list(second) == ["fine_noisy", "fine_timestep", "fine_target", "fine_weight"]
    assert not torch.equal(second["fine_timestep"], first["timestep"])
    assert not torch.equal(second["fine_target"], first["target"])


def test_each_sample_is_noised_alike_in_any_slice_of_the_batch() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    component = noise_component(schedule, seed=0, min_snr_gamma=5.0)
    latents, key = torch.randn(7, 2, 3, 3), keys(2, 7)
    whole = run(component, latents, key)
    for part in (slice(0, 3), slice(3, 7), slice(6, 7)):
        for name, value in run(component, latents[part], key[part]).items():
            assert torch.equal(value, whole[name][part]), name


def test_min_snr_weights_are_those_of_the_drawn_timesteps() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    written = run(
        noise_component(schedule, seed=0, min_snr_gamma=5.0), torch.zeros(50, 1), keys(0, 50)
    )
    expected = torch.from_numpy(min_snr_weights(schedule, 5.0))[written["timestep"]]
    assert torch.equal(written["weight"], expected)
    assert written["weight"].unique().numel() > 3


def test_logit_normal_prefers_the_middle_of_a_flow() -> None:
    schedule = NoiseSchedule.from_scheduler(FlowMatchEulerDiscreteScheduler())
    component = noise_component(schedule, seed=0, density=TimestepDensity.LOGIT_NORMAL)
    t = run(component, torch.zeros(4000, 1), keys(0, 4000))["timestep"]
    assert t.dtype is torch.float32
    middle = ((t > 250) & (t <= 750)).double().mean()
    assert abs(middle - 0.7280) < 5 * 0.445 * 4000**-0.5  # P(|normal| < ln 3)


def test_latents_keep_their_dtype_and_targets_are_float32() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    latents = torch.randn(2, 3, dtype=torch.bfloat16)
    written = run(noise_component(schedule, seed=0), latents, keys(0, 2))
    assert written["noisy"].dtype is torch.bfloat16
    assert written["target"].dtype is torch.float32


def test_a_fake_tensor_trace_gets_through() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    component = noise_component(schedule, seed=0, min_snr_gamma=5.0)
    with FakeTensorMode():
        key = torch.empty(3, 2, dtype=torch.int64)
        written = run(component, torch.empty(3, 4, 8, 8), key)
    assert {name: tuple(value.shape) for name, value in written.items()} == {
        "noisy": (3, 4, 8, 8),
        "timestep": (3,),
        "target": (3, 4, 8, 8),
        "weight": (3,),
    }


@pytest.mark.parametrize("loader", [0, 3])
@pytest.mark.parametrize("density", ["uniform", "logit_normal"])
def test_a_level_fixes_the_timestep_and_no_other_draw(loader: int, density: str) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler() if density != "uniform" else DDPMScheduler()
    schedule = NoiseSchedule.from_scheduler(scheduler)
    component = noise_component(schedule, seed=3, density=TimestepDensity(density))
    latents, key = torch.randn(6, 2, 4, 4), keys(-1 - loader, 6)
    assert levels(key).tolist() == [0] * 6
    for level in range(1, NUM_LEVELS):
        fixed = at_level(key, level)
        assert levels(fixed).tolist() == [level] * 6
        written = run(component, latents, fixed)
        noise = normal(3, "noise", key, (2, 4, 4))
        at = int((schedule.timesteps == float(written["timestep"][0])).nonzero()[0][0])
        index = torch.full((6,), at)
        assert torch.equal(written["timestep"], schedule.timestep(index))
        assert torch.equal(written["noisy"], schedule.add_noise(latents, noise, index))
        below = float((schedule.timesteps < float(written["timestep"][0])).mean())
        assert below == pytest.approx(level / NUM_LEVELS, abs=2 / schedule.num_steps)
        assert torch.equal(at_level(fixed, level), fixed)


def test_a_level_needs_a_validation_key_and_is_one_of_nine() -> None:
    with pytest.raises(SpecError, match=r"level 3 for draw keys of batches \[0\]"):
        at_level(keys(0, 2), 3)
    for level in (0, NUM_LEVELS):
        with pytest.raises(SpecError, match="expected a level of 1 to 9"):
            at_level(keys(-1, 2), level)


def test_noise_offset_shifts_each_channel_by_a_draw_of_its_own() -> None:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    latents, key = torch.randn(5, 3, 4, 4), keys(2, 5)
    plain = run(noise_component(schedule, seed=3), latents, key)
    shifted = run(noise_component(schedule, seed=3, noise_offset=0.1), latents, key)
    shift = normal(3, "noise_offset", key, (3, 1, 1))
    noise = normal(3, "noise", key, (3, 4, 4)) + 0.1 * shift
    index = integers(3, "timestep", key, 1000)
    assert torch.equal(shifted["target"], noise)
    assert torch.equal(shifted["noisy"], schedule.add_noise(latents, noise, index))
    assert torch.equal(shifted["timestep"], plain["timestep"])
    assert not torch.equal(shift[0], shift[1])
    many = normal(3, "noise_offset", keys(2, 4000), (3, 1, 1))
    assert float(many.std()) == pytest.approx(1.0, abs=0.05)
    none = run(noise_component(schedule, seed=3, noise_offset=0.0), latents, key)
    assert all(torch.equal(none[name], plain[name]) for name in plain)
    with pytest.raises(SpecError, match=r"noise_offset is -0\.1"):
        noise_component(schedule, seed=3, noise_offset=-0.1)

"""Conditioning augmentation: the small picture, enlarged and noised by a known amount."""

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.objective.cascade import ConditioningAugmentation, small_picture
from lightning_dpipe.objective.schedule import NoiseSchedule


def augmentation(strongest: float = 0.5) -> ConditioningAugmentation:
    schedule = NoiseSchedule.from_scheduler(DDPMScheduler())
    return ConditioningAugmentation(
        schedule=schedule, seed=4, strongest=strongest, factor=2, unshuffle=2
    )


def keys(count: int) -> Tensor:
    return torch.stack([torch.arange(count) // 4, torch.arange(count) % 4], dim=1)


def test_no_noise_is_the_enlarged_picture_and_says_so() -> None:
    small, noise = torch.randn(3, 3, 4, 4), torch.randn(3, 3, 4, 4)
    made = augmentation().at(small, noise, torch.zeros(3))
    assert made.shape == (3, 3 * 4 + 1, 4, 4)
    large = torch.nn.functional.pixel_shuffle(made[:, :-1], 2)
    assert torch.equal(large, small.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
    assert (made[:, -1] == 0).all()


@pytest.mark.parametrize("level", [0.001, 0.25, 0.5, 1.0])
def test_a_level_is_that_share_of_the_forward_process(level: float) -> None:
    small, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    made = augmentation().at(small, noise, torch.tensor([level, 0.0]))
    expected = DDPMScheduler().add_noise(small, noise, torch.tensor(round(level * 1000) - 1))
    large = torch.nn.functional.pixel_shuffle(made[:, :-1], 2)
    torch.testing.assert_close(large[0, :, ::2, ::2], expected[0])
    assert torch.equal(large[1, :, 1::2, 1::2], small[1])
    assert (made[0, -1] == level).all()


def test_levels_are_uniform_up_to_the_strongest_and_keyed_by_the_sample() -> None:
    small = torch.randn(2000, 3, 4, 4)
    whole = augmentation(0.4)(small, keys(2000))
    levels = whole[:, -1, 0, 0]
    assert 0 <= float(levels.min()) < 0.01
    assert 0.39 < float(levels.max()) < 0.4
    assert abs(float(levels.mean()) - 0.2) < 0.01
    part = augmentation(0.4)(small[700:703], keys(2000)[700:703])
    assert torch.equal(part, whole[700:703])


def test_the_small_picture_is_the_mean_of_its_pixels() -> None:
    image = torch.randn(2, 3, 8, 8)
    (layer,) = small_picture(2).layers
    torch.testing.assert_close(
        layer.module(image), image.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5))
    )


def test_a_share_beyond_the_schedule_is_refused() -> None:
    with pytest.raises(SpecError, match=r"augmentation is 1.5; expected a share"):
        augmentation(1.5)

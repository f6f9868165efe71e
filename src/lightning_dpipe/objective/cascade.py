"""What a super-resolution model of a cascade reads: the small picture, noised on purpose.

In:     small images ``[batch, channels, height, width]``, draw keys int64 ``[batch, 2]``.
Out:    ``[batch, channels x unshuffle^2 + 1, ...]`` of the size that the model works on: the small
        picture enlarged, noised and unshuffled, and how far it was noised.
Source: conditioning augmentation: Ho et al., "Cascaded diffusion models", arXiv 2106.15282,
        section 4: the forward process up to a uniform time s, of which the model is told. There the
        model embeds s as it embeds its own timestep; here s is one more channel, constant over the
        picture, so that a plain U-Net can read it.

Without it the model would trust pictures as it sees in training, real ones made small, and enlarge
every flaw of those that the base model draws.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import DRAW_KEY, FrozenComponent, Layer
from lightning_dpipe.objective.draws import normal, uniform
from lightning_dpipe.objective.schedule import NoiseSchedule


@dataclass(frozen=True, kw_only=True, eq=False)
class ConditioningAugmentation:
    """``(small, draw_key) -> conditioning``; a pure function of both.

    Attributes:
        schedule: The forward process that noises the small picture.
        seed: The run's seed.
        strongest: Largest s in training, as a share of the schedule's steps, in ``[0, 1]``.
        factor: Side of the large picture over that of the small one.
        unshuffle: Pixels per side that the model reads as channels.
    """

    schedule: NoiseSchedule
    seed: int
    strongest: float
    factor: int
    unshuffle: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.strongest <= 1.0:
            raise SpecError(
                f"the strongest conditioning augmentation is {self.strongest}; expected a share of "
                "the noise schedule, in [0, 1] (0 trains on clean small pictures)"
            )

    @torch.no_grad()
    def __call__(self, small: Tensor, draw_key: Tensor) -> Tensor:
        """The training side: s and noise are drawn for each sample."""
        level = uniform(self.seed, "augmentation_level", draw_key) * self.strongest
        noise = normal(self.seed, "augmentation", draw_key, small.shape[1:])
        return self.at(small, noise.to(small.device), level.to(small.device))

    @torch.no_grad()
    def at(self, small: Tensor, noise: Tensor, level: Tensor) -> Tensor:
        """The picture noised to a given level.

        Args:
            small: ``[batch, channels, height, width]``.
            noise: Of the same shape.
            level: s as a share of the schedule's steps, ``[batch]``; 0 adds no noise.
        """
        steps = self.schedule.num_steps
        index = (level * steps).ceil().long().clamp(max=steps) - 1  # -1: left clean
        noised = self.schedule.add_noise(small.float(), noise, index.clamp(min=0))
        clean = (index < 0).view(-1, 1, 1, 1)
        large = nn.functional.interpolate(
            torch.where(clean, small.float(), noised), scale_factor=float(self.factor)
        )
        picture = nn.functional.pixel_unshuffle(large, self.unshuffle)
        told = level.view(-1, 1, 1, 1).expand(-1, 1, *picture.shape[2:])
        return torch.cat([picture, told.to(picture.dtype)], dim=1)


def conditioning_component(
    augmentation: ConditioningAugmentation,
    *,
    small: str = "small",
    writes: str = "conditioning",
    name: str = "augmentation",
) -> FrozenComponent:
    """The augmentation as frozen work: it depends on data and draws only, so it runs ahead."""
    layer = Layer(name="augment", module=augmentation, reads=(small, DRAW_KEY), writes=(writes,))
    return FrozenComponent(name=name, layers=(layer,))


def small_picture(
    factor: int, *, reads: str = "image", writes: str = "small", name: str = "small"
) -> FrozenComponent:
    """What the base model draws: the image, each ``factor x factor`` pixels averaged."""
    layer = Layer(name="average", module=nn.AvgPool2d(factor), reads=(reads,), writes=(writes,))
    return FrozenComponent(name=name, layers=(layer,))

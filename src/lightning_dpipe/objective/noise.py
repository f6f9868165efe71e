"""Noise as a frozen component: draws a timestep and noise per sample, writes the training pair.

In:     clean latents ``[batch, ...]`` and the draw keys int64 ``[batch, 2]``.
Out:    noisy latents, timestep, target and loss weight. The component has no weights; it exists so
        that work that depends on the noisy latents can run ahead with the encoders.
Source: logit-normal timesteps for flow models: Esser et al., arXiv 2403.03206, section 3.1; noise
        offset: Guttenberg, "Diffusion with offset noise" (2023).
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import DRAW_KEY, FrozenComponent, Layer
from lightning_dpipe.objective.draws import NUM_LEVELS, integers, levels, normal
from lightning_dpipe.objective.losses import min_snr_weights
from lightning_dpipe.objective.resolution import ResolutionShift
from lightning_dpipe.objective.schedule import NoiseSchedule


class TimestepDensity(str, Enum):
    """How timesteps are drawn: all alike, or with the middle of the schedule more often."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseDraw:
    """``(latents, draw_key) -> (noisy, timestep, target, weight)``; a pure function of both.

    `noisy` keeps the latents' dtype, `target` and `weight` are float32. `weights` is a table over
    the schedule's index, or None for ones. Draws of another `prefix` are other numbers. `shift`
    makes of the schedule the one for the latents' size. `offset` adds to the noise one normal
    number per channel, times the offset.
    """

    schedule: NoiseSchedule
    seed: int
    density: TimestepDensity = TimestepDensity.UNIFORM
    weights: npt.NDArray[np.float32] | None = None
    prefix: str = ""
    shift: ResolutionShift | None = None
    offset: float = 0.0

    @torch.no_grad()
    def __call__(self, latents: Tensor, draw_key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Noise one batch; shapes as in the class docstring."""
        schedule, index = self.schedule, self._index(draw_key)
        if self.shift is not None:
            schedule = self.shift.schedule(schedule, latents.shape)
        if self.weights is None:
            weight = torch.ones(index.shape, device=index.device)
        else:
            weight = torch.tensor(self.weights, device=index.device)[index]
        noise = normal(self.seed, f"{self.prefix}noise", draw_key, latents.shape[1:])
        if self.offset:
            shape = (latents.shape[1], *[1] * (latents.ndim - 2))
            noise = noise + self.offset * normal(
                self.seed, f"{self.prefix}noise_offset", draw_key, shape
            )
        noise = noise.to(latents.device)
        timestep = schedule.timestep(index)
        index = index.to(latents.device)
        x0 = latents.to(torch.float32, copy=True)  # `target` may be x0: never the latents' own
        noisy = schedule.add_noise(x0, noise, index).to(latents.dtype)
        target = schedule.target(x0, noise, index)
        return noisy, timestep.to(latents.device), target, weight.to(latents.device)

    def _index(self, draw_key: Tensor) -> Tensor:
        level = levels(draw_key)
        fixed = self.schedule.index_at(level, NUM_LEVELS)
        return torch.where(level > 0, fixed, self._drawn(draw_key))

    def _drawn(self, draw_key: Tensor) -> Tensor:
        num_steps, purpose = self.schedule.num_steps, f"{self.prefix}timestep"
        if self.density is TimestepDensity.UNIFORM:
            return integers(self.seed, purpose, draw_key, num_steps)
        # Flow schedules run from noise to data, as do diffusers' training scripts' indices.
        quantile = normal(self.seed, purpose, draw_key, ()).sigmoid()
        return (quantile * num_steps).long().clamp_(max=num_steps - 1)


def noise_component(
    schedule: NoiseSchedule,
    *,
    seed: int,
    latents: str = "latents",
    density: TimestepDensity = TimestepDensity.UNIFORM,
    min_snr_gamma: float | None = None,
    name: str = "noise",
    prefix: str = "",
    shift: ResolutionShift | None = None,
    noise_offset: float = 0.0,
) -> FrozenComponent:
    """Build the component: reads `latents`, writes ``noisy``, ``timestep``, ``target``, ``weight``.

    Args:
        schedule: The forward process.
        seed: The run's seed; draws are keyed by it, a purpose and the sample's draw key.
        latents: Name of the clean latents ``[batch, channels, ...]``.
        density: How timesteps are drawn.
        min_snr_gamma: Weight losses by min-SNR (5 in the paper); None weighs all alike.
        name: The component's name.
        prefix: Put before the names it writes; models of a cascade have a noise component each.
        shift: Time shift by the latents' size (flow models); None for none.
        noise_offset: Deviation of a shift of each channel's noise (0.1 is usual), which lets a
            model learn images that are bright or dark as a whole.

    Raises:
        SpecError: `min_snr_gamma` is not positive, or `noise_offset` is negative.
        UnsupportedError: `min_snr_gamma` with a flow schedule.
    """
    if noise_offset < 0:
        raise SpecError(f"noise_offset is {noise_offset}; expected 0 or more (0.1 is usual)")
    weights = None if min_snr_gamma is None else min_snr_weights(schedule, min_snr_gamma)
    draw = NoiseDraw(
        schedule=schedule,
        seed=seed,
        density=TimestepDensity(density),
        weights=weights,
        prefix=prefix,
        shift=shift,
        offset=noise_offset,
    )
    layer = Layer(
        name="draw",
        module=draw,
        reads=(latents, DRAW_KEY),
        writes=tuple(prefix + w for w in ("noisy", "timestep", "target", "weight")),
    )
    return FrozenComponent(name=name, layers=(layer,))

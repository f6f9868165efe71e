"""Self-conditioning: the backbone also reads its own first estimate of the clean sample.

In:     the model's output, the noisy sample and its timestep.
Out:    the clamped estimate of x0, or the `SelfConditioning` that feeds it back.
Source: Analog Bits, Chen et al., arXiv 2208.04202.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpipe.models.spec import SelfConditioning
from lightning_dpipe.objective.losses import drop_learned_sigma
from lightning_dpipe.objective.schedule import NoiseSchedule


@dataclass(frozen=True, kw_only=True, eq=False)
class CleanEstimate:
    """``(out, noisy, timestep) -> estimate of x0``, float32 ``[batch, channels, ...]``.

    `clamp` bounds the estimate's magnitude: 1 for pixels in ``[-1, 1]``; latents need about 4
    standard deviations.
    """

    schedule: NoiseSchedule
    clamp: float = 1.0

    @torch.no_grad()
    def __call__(self, out: Tensor, noisy: Tensor, timestep: Tensor) -> Tensor:
        """Estimate, dropping a learned variance half of `out` first."""
        prediction = drop_learned_sigma(out, noisy.shape[1]).float()
        x0 = self.schedule.estimate(prediction, noisy.float(), timestep)
        return x0.clamp(-self.clamp, self.clamp)


def self_conditioning(
    schedule: NoiseSchedule,
    *,
    shape: tuple[int, ...],
    probability: float = 0.5,
    clamp: float = 1.0,
    writes: str = "estimate",
    reads: tuple[str, str, str] = ("out", "noisy", "timestep"),
) -> SelfConditioning:
    """Describe the feedback from the last stage to the first.

    Args:
        schedule: The forward process, which says what the output stands for.
        shape: One sample's estimate, ``(channels, ...)``.
        probability: Share of global batches that run the extra forward.
        clamp: Largest magnitude of the estimate.
        writes: Name under which the backbone reads it.
        reads: Names of output, noisy sample and timestep.

    Raises:
        SpecError: `probability` is outside ``[0, 1]``.
    """
    return SelfConditioning(
        writes=writes,
        estimate=CleanEstimate(schedule=schedule, clamp=clamp),
        reads=reads,
        shape=shape,
        probability=probability,
    )

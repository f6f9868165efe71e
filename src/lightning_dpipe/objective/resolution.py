"""Resolution-dependent time shift of flow models: larger images are trained at more noise.

In:     a flow-matching scheduler's configuration and the side of a patch.
Out:    the schedule for a latent's size, and the arguments diffusers' sampler wants for it.
Source: Esser et al., arXiv 2403.03206, section 5.3.2; diffusers' ``calculate_shift`` and
        ``FlowMatchEulerDiscreteScheduler.time_shift``, which the tables are checked with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_dpipe.objective.schedule import NoiseSchedule


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolutionShift:
    """``mu`` is linear in the number of tokens, through (few tokens, low) and (many, high)."""

    scheduler: Any
    patch: int
    _known: dict[int, NoiseSchedule] = field(default_factory=dict, repr=False)

    @classmethod
    def from_scheduler(cls, scheduler: Any, patch: int) -> "ResolutionShift | None":
        """Read a scheduler's configuration; None if it does not shift by resolution.

        Args:
            scheduler: Any diffusers scheduler.
            patch: Side of the square of latent pixels that is one token.
        """
        if not scheduler.config.get("use_dynamic_shifting"):
            return None
        return cls(scheduler=type(scheduler).from_config(scheduler.config), patch=patch)

    def num_tokens(self, shape: Sequence[int]) -> int:
        """Tokens of a latent ``[..., height, width]``."""
        return (shape[-2] // self.patch) * (shape[-1] // self.patch)

    def mu(self, num_tokens: int) -> float:
        """Logarithm of the shift."""
        config = self.scheduler.config
        few, many = config.base_image_seq_len, config.max_image_seq_len
        slope = (config.max_shift - config.base_shift) / (many - few)
        return float(num_tokens * slope + (config.base_shift - slope * few))

    def schedule(self, plain: NoiseSchedule, shape: Sequence[int]) -> NoiseSchedule:
        """The schedule of latents ``[..., height, width]``, made once a size."""
        num_tokens = self.num_tokens(shape)
        if num_tokens not in self._known:
            sigma = self.scheduler.time_shift(self.mu(num_tokens), 1.0, plain.sigma)
            sigma = sigma.astype(np.float32)
            self._known[num_tokens] = replace(
                plain, signal=1 - sigma, sigma=sigma, timesteps=sigma * np.float32(plain.num_steps)
            )
        return self._known[num_tokens]

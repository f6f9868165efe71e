"""Noise schedules: the forward process of a diffusers scheduler, as tables.

In:     a diffusers scheduler (its config decides betas, prediction type, flow shift).
Out:    noisy latents, the tensor the model must predict, and the estimate of x0 from its output.
Source: diffusers' ``add_noise`` / ``get_velocity`` / ``scale_noise``, matched bit for bit in
        float32; v-prediction: Salimans & Ho, arXiv 2202.00512; flow: Lipman et al., 2210.02747.

Every process here is ``noisy = signal * x0 + sigma * noise`` with one pair (signal, sigma) per
index. The tables are numpy arrays: a schedule is a value without device, dtype or place in a model.
"""

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError

log = logging.getLogger(__name__)

_TINY = 1e-6  # keeps the estimate finite where the terminal signal is exactly zero


class Prediction(str, Enum):
    """What the model's output stands for."""

    EPSILON = "epsilon"
    SAMPLE = "sample"
    V = "v_prediction"
    FLOW = "flow_prediction"


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseSchedule:
    """Tables over the index ``0 <= i < num_steps``.

    Attributes:
        signal: float32 ``[num_steps]``, factor of the clean sample.
        sigma: float32 ``[num_steps]``, factor of the noise.
        timesteps: ``[num_steps]``, what the model is told: int64, or float32 for flow models.
        prediction: What the model predicts.
    """

    signal: npt.NDArray[np.float32]
    sigma: npt.NDArray[np.float32]
    timesteps: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    prediction: Prediction

    @classmethod
    def from_scheduler(
        cls, scheduler: Any, *, prediction: Prediction | str | None = None
    ) -> "NoiseSchedule":
        """Read a diffusers scheduler: DDPM's family (``alphas_cumprod``) or flow matching.

        Args:
            scheduler: Its configuration says what the model predicts.
            prediction: Overrides that; one that disagrees is warned of, since a model that was
                trained for the scheduler's would learn another thing anew. Only within DDPM's
                family.

        Raises:
            UnsupportedError: The scheduler is of another kind, or its prediction type is unknown.
        """
        scheduler = type(scheduler).from_config(scheduler.config)  # set_timesteps may have run
        if hasattr(scheduler, "alphas_cumprod"):
            alpha_bar = scheduler.alphas_cumprod
            prediction = _prediction(scheduler.config.prediction_type, prediction)
            return cls(
                signal=(alpha_bar**0.5).numpy(),
                sigma=((1 - alpha_bar) ** 0.5).numpy(),
                timesteps=np.arange(len(alpha_bar)),
                prediction=prediction,
            )
        if type(scheduler).__name__.startswith("FlowMatch"):
            if prediction not in (None, Prediction.FLOW):
                raise UnsupportedError(
                    f"prediction {prediction!r} with {type(scheduler).__name__}, whose models "
                    f"predict {Prediction.FLOW.value!r}; leave it out, or use another scheduler"
                )
            sigmas = scheduler.sigmas[: scheduler.config.num_train_timesteps].cpu()
            return cls(
                signal=(1.0 - sigmas).numpy(),
                sigma=sigmas.numpy(),
                timesteps=scheduler.timesteps[: len(sigmas)].cpu().numpy(),
                prediction=Prediction.FLOW,
            )
        raise UnsupportedError(
            f"{type(scheduler).__name__} has neither alphas_cumprod nor a flow-matching name; "
            "pass a DDPM-family or FlowMatch scheduler"
        )

    @property
    def num_steps(self) -> int:
        """Length of the tables."""
        return len(self.signal)

    def timestep(self, index: Tensor) -> Tensor:
        """Look up what the model is told, ``[batch]``."""
        return torch.tensor(self.timesteps, device=index.device)[index]

    def index_at(self, part: Tensor, parts: int) -> Tensor:
        """The index, int64 ``[batch]``, below which ``part / parts`` of the timesteps are.

        Timesteps count from little noise to much, also where the tables run the other way (flow).
        """
        index = torch.div(part * self.num_steps, parts, rounding_mode="floor")
        index = index.clamp(max=self.num_steps - 1)
        return index if self.timesteps[0] <= self.timesteps[-1] else self.num_steps - 1 - index

    def add_noise(self, x0: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Noise a clean sample: ``[batch, ...]`` at ``index`` int64 ``[batch]``."""
        return self._at(self.signal, index, x0) * x0 + self._at(self.sigma, index, x0) * noise

    def target(self, x0: Tensor, noise: Tensor, index: Tensor) -> Tensor:
        """Compute what the model must output for this sample, ``[batch, ...]``."""
        match self.prediction:
            case Prediction.EPSILON:
                return noise
            case Prediction.SAMPLE:
                return x0
            case Prediction.V:
                signal, sigma = self._at(self.signal, index, x0), self._at(self.sigma, index, x0)
                return signal * noise - sigma * x0
            case Prediction.FLOW:
                return noise - x0

    def estimate(self, out: Tensor, noisy: Tensor, timestep: Tensor) -> Tensor:
        """Estimate x0 from the model's output at `timestep` ``[batch]``; ``[batch, ...]``.

        Epsilon divides by the signal, which makes estimates near pure noise huge: clamp them.
        """
        if self.prediction is Prediction.SAMPLE:
            return out
        if self.prediction is Prediction.FLOW:
            sigma = (timestep / self.num_steps).view(-1, *[1] * (out.ndim - 1))
            return noisy - sigma * out
        signal, sigma = self._at(self.signal, timestep, out), self._at(self.sigma, timestep, out)
        if self.prediction is Prediction.V:
            return signal * noisy - sigma * out
        return (noisy - sigma * out) / signal.clamp(min=_TINY)

    def noise(self, out: Tensor, noisy: Tensor, timestep: Tensor) -> Tensor:
        """Estimate the noise from the model's output at `timestep` ``[batch]``; ``[batch, ...]``.

        Predictions of the sample divide by sigma, which is zero where there is no noise.
        """
        if self.prediction is Prediction.EPSILON:
            return out
        if self.prediction is Prediction.FLOW:
            return self.estimate(out, noisy, timestep) + out
        signal, sigma = self._at(self.signal, timestep, out), self._at(self.sigma, timestep, out)
        if self.prediction is Prediction.V:
            return signal * out + sigma * noisy
        return (noisy - signal * out) / sigma.clamp(min=_TINY)

    @staticmethod
    def _at(table: npt.NDArray[np.float32], index: Tensor, like: Tensor) -> Tensor:
        """Take one factor per sample, shaped to multiply `like`.

        `torch.tensor` copies the small table each time: it follows the data to any device, and
        under a FakeTensor trace it becomes fake, which a stored tensor would not.
        """
        return torch.tensor(table, device=index.device)[index].view(-1, *[1] * (like.ndim - 1))


def _prediction(configured: str, wanted: Prediction | str | None) -> Prediction:
    """What the model is to predict; an override that disagrees with the scheduler is warned of."""
    known = [p.value for p in Prediction]
    for name in (configured, wanted):
        if name is not None and name not in known:
            raise UnsupportedError(
                f"prediction_type is {name!r}; expected one of {', '.join(known)}"
            )
    theirs = Prediction(configured)
    chosen = theirs if wanted is None else Prediction(wanted)
    if chosen is not theirs:
        log.warning(
            "the model is trained to predict %s, but its scheduler is configured for %s: trained "
            "weights expect the latter, and whoever samples must be told the former",
            chosen.value,
            theirs.value,
        )
    return chosen

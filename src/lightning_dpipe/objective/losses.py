"""Per-sample losses and their weights.

In:     the model's output, its target, one weight per sample.
Out:    ``[batch]`` float32: the engine takes the exact mean over the global batch.
Source: min-SNR-gamma: Hang et al., arXiv 2303.09556, section 3.4, per prediction type.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.objective.schedule import NoiseSchedule, Prediction


def drop_learned_sigma(out: Tensor, num_channels: int) -> Tensor:
    """Keep the prediction of a model that also outputs a variance (DiT, PixArt).

    Args:
        out: ``[batch, channels, ...]`` with `num_channels` channels, or twice as many.
        num_channels: Channels of the latents.

    Raises:
        SpecError: `out` has another number of channels.
    """
    if out.shape[1] == 2 * num_channels:
        return out[:, :num_channels]
    if out.shape[1] != num_channels:
        raise SpecError(
            f"the model's output has {out.shape[1]} channels for latents with {num_channels}; "
            f"expected {num_channels}, or {2 * num_channels} with a learned variance"
        )
    return out


def weighted_mse(out: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Compute the weighted mean squared error of each sample, in float32.

    Args:
        out: ``[batch, channels, ...]``; a learned variance half is dropped.
        target: ``[batch, channels, ...]``.
        weight: ``[batch]``.

    Returns:
        ``[batch]``, the mean over all other dimensions times the weight.
    """
    error = drop_learned_sigma(out, target.shape[1]).float() - target.float()
    return error.square().flatten(1).mean(1) * weight


def min_snr_weights(schedule: NoiseSchedule, gamma: float) -> npt.NDArray[np.float32]:
    """Tabulate min-SNR weights over the schedule, ``[num_steps]``; finite at zero terminal SNR.

    ``min(snr, gamma)`` is the weight of the error in x0; dividing by ``snr`` (epsilon) or
    ``snr + 1`` (v) expresses it for the model's own output. At ``snr = 0`` epsilon's 0/0 is
    replaced by its limit 1.

    Raises:
        SpecError: `gamma` is not positive.
        UnsupportedError: The schedule is a flow, for which the weighting is not defined.
    """
    if not gamma > 0:
        raise SpecError(f"min-SNR gamma is {gamma}; expected a positive number (5 in the paper)")
    signal, sigma = schedule.signal.astype(np.float64), schedule.sigma.astype(np.float64)
    # In terms of signal**2 and sigma**2, so that neither a zero signal nor a zero sigma divides.
    clipped = np.minimum(signal**2, gamma * sigma**2)  # min(snr, gamma) * sigma**2
    match schedule.prediction:
        case Prediction.EPSILON:
            positive = signal > 0
            weights = np.where(positive, clipped / np.where(positive, signal**2, 1.0), 1.0)
        case Prediction.V:
            weights = clipped / (signal**2 + sigma**2)
        case Prediction.SAMPLE:
            weights = np.where(sigma > 0, clipped / np.where(sigma > 0, sigma**2, 1.0), gamma)
        case Prediction.FLOW:
            raise UnsupportedError(
                "min-SNR weighting is not defined for flow matching; leave min_snr_gamma unset"
            )
    return weights.astype(np.float32)

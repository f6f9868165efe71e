"""What the shipped modules share when they draw samples."""

import torch
from torch import Tensor

from lightning_dpipe.objective.draws import normal


def starting_noise(
    seed: int,
    num_samples: int,
    shape: tuple[int, ...],
    device: torch.device,
    purpose: str = "sample",
) -> Tensor:
    """Unit normal noise ``[num_samples, *shape]``, the same for one seed on every machine.

    Models of a cascade draw theirs for different purposes.
    """
    keys = torch.stack([torch.zeros(num_samples), torch.arange(num_samples)], dim=1).long()
    return normal(seed, purpose, keys, shape).to(device)

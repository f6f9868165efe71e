"""Nearest-image ranks: is the asked image the nearest real one to a sample?

In:     samples and real images ``[n, channels, height, width]``.
Out:    one rank per sample, 1 = the asked image is the nearest of all in pixel distance.

A check of recall on a small set, not a measure of quality: chance is a rank in the middle.
"""

import torch
from torch import Tensor


def nearest_ranks(samples: Tensor, references: Tensor, asked: Tensor) -> tuple[int, ...]:
    """Rank each sample's asked image among the references by squared pixel distance.

    Args:
        samples: ``[num_samples, ...]``.
        references: All real images, ``[num_references, ...]``.
        asked: int64 ``[num_samples]``, position of each sample's image in `references`.

    Returns:
        Per sample, 1 + the number of references strictly nearer than the asked one.
    """
    distances = torch.cdist(samples.flatten(1).double(), references.flatten(1).double())
    own = distances.gather(1, asked[:, None])
    return tuple((distances < own).sum(1).add(1).tolist())

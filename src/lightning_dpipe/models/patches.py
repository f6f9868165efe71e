"""Tokens and images: how diffusion transformers put patches back together."""

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError


def unpatchify(h: Tensor, sample: Tensor, *, patch: int, channels: int) -> Tensor:
    """Image ``[batch, channels, height, width]`` of the size of `sample` from its tokens.

    Args:
        h: ``[batch, tokens, patch * patch * channels]``, rows of patches from the top left.
        sample: The noisy latent; only its size is read.
        patch: Side of a patch.
        channels: Of the image.
    """
    height, width = sample.shape[-2] // patch, sample.shape[-1] // patch
    h = h.reshape(-1, height, width, patch, patch, channels)
    h = torch.einsum("nhwpqc->nchpwq", h)
    return h.reshape(-1, channels, height * patch, width * patch)


def check_sides(sample: Tensor, multiple: int, what: str) -> None:
    """Refuse a latent that does not divide into patches.

    Raises:
        SpecError: Its size and `multiple` are named.
    """
    height, width = sample.shape[-2:]
    if height % multiple or width % multiple:
        raise SpecError(
            f"the latent is {height}x{width}; {what} cuts it into squares of {multiple}: "
            f"crop or pad to multiples of {multiple}"
        )

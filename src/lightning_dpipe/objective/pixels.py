"""Pixels as latents: a frozen "image encoder" for small images, without weights.

In:     images float32 ``[batch, channels, height, width]``.
Out:    ``[batch, channels x factor^2, height / factor, width / factor]``, the same numbers.
"""

from torch import nn

from lightning_dpipe.models.spec import FrozenComponent, Layer


def pixel_latents(
    factor: int, *, reads: str = "image", writes: str = "latents", name: str = "pixels"
) -> FrozenComponent:
    """Build the component; ``torch.nn.PixelShuffle(factor)`` undoes it on samples."""
    layer = Layer(
        name="pixel_unshuffle", module=nn.PixelUnshuffle(factor), reads=(reads,), writes=(writes,)
    )
    return FrozenComponent(name=name, layers=(layer,))

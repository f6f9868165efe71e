"""Weights for measuring a layer whose own are not there yet.

In: parameters on meta. Out: the same objects with made-up values of a trained layer's size, for the
length of a ``with`` block; so that a model larger than a rank's memory is measured layer by layer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PERIOD = 65521  # a prime: rows of a matrix do not repeat


@contextmanager
def standing_in(parameters: Sequence[nn.Parameter], device: torch.device) -> Iterator[bool]:
    """Put values into what is on meta, and take them out again. No graph may outlive the block.

    The block is told whether there was anything to put in.
    """
    absent = [p for p in parameters if p.is_meta]
    real = [nn.Parameter(made_up(p, device), requires_grad=p.requires_grad) for p in absent]
    _swap(absent, real)
    try:
        yield bool(absent)
    finally:
        _swap(absent, real)


def _swap(absent: Sequence[nn.Parameter], real: Sequence[nn.Parameter]) -> None:
    swap: Any = torch.utils.swap_tensors
    if absent:  # autocast's copies of weights point back at them
        torch.clear_autocast_cache()
    for p, value in zip(absent, real, strict=True):
        swap(p, value)


def made_up(like: Tensor, device: torch.device) -> Tensor:
    """Ones for vectors, else normal numbers divided by the root of the inputs of one output.

    Copied from one block of random numbers: drawing all of them takes as long as the layer.
    """
    if like.dim() < 2:
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    block = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0))
    block = (block / max(like[0].numel(), 1) ** 0.5).to(device, like.dtype)
    flat = torch.empty(like.numel(), dtype=like.dtype, device=device)
    whole = like.numel() // _PERIOD
    flat[: whole * _PERIOD].view(whole, _PERIOD).copy_(block)
    flat[whole * _PERIOD :].copy_(block[: like.numel() - whole * _PERIOD])
    return flat.view(like.shape)

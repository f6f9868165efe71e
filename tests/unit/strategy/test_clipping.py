"""The joint norm against torch's own, on one rank. (Several ranks: dist/.)"""

import pytest
import torch
from torch import nn

from lightning_dpipe.strategy.clipping import clip_by_norm
from lightning_dpipe.strategy.collectives import HostLink


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_one_rank_clips_as_torch_bit_for_bit(max_norm: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = [nn.Parameter(torch.empty(n, 3)) for n in range(1, 40)]
    theirs = [nn.Parameter(torch.empty(n, 3)) for n in range(1, 40)]
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if index % 5:
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
    norm = clip_by_norm(ours, max_norm, HostLink(), torch.device("cpu"))
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)

"""Clipping by the norm of the whole model, each rank holding a part of it.

In:     parameters in the order of the uncut model (absent ones on meta, without a gradient).
Out:    the same scale factor on all ranks.

The norms of single parameters are gathered in full-model order and the norm of that stack is taken,
which is how torch computes it for a whole model: the result is equal in every bit. Each parameter
counts once, however many ranks hold it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dpipe.runtime.distributed import collective_device
from lightning_dpipe.strategy.collectives import HostLink


def total_norm(parameters: Sequence[nn.Parameter], link: HostLink, device: torch.device) -> Tensor:
    """L2 norm of all ranks' gradients, a float32 scalar on `device`.

    `parameters` are those of the optimizer, the same on every rank up to absence.
    """
    norms = torch.zeros(2, len(parameters), device=device)
    held = [i for i, p in enumerate(parameters) if p.grad is not None]
    if held:
        index = torch.tensor(held, device=device)
        values = torch._foreach_norm([_gradient(parameters[i]) for i in held], 2.0)
        norms[0, index] = torch.stack([v.to(device, torch.float32) for v in values])
        norms[1, index] = 1.0
    if link.world_size > 1:
        norms = norms.to(collective_device(device))  # gloo gathers host memory only
        every = [torch.empty_like(norms) for _ in range(link.world_size)]
        dist.all_gather(every, norms)
        stacked = torch.stack(every).to(device)
        first = stacked[:, 1].argmax(dim=0, keepdim=True)  # the lowest rank that has a gradient
        norms = torch.stack([stacked[:, 0].gather(0, first)[0], stacked[:, 1].amax(dim=0)])
    present = norms[1] > 0
    norm: Tensor = torch.linalg.vector_norm(norms[0][present], 2.0)
    return norm


def clip_by_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, link: HostLink, device: torch.device
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; return the norm."""
    norm = total_norm(parameters, link, device)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

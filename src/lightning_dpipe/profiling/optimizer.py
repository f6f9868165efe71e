"""What an AdamW step costs: so much per weight tensor and so much per byte.

Measured on throw-away tensors, so that the model is not touched. The two parts differ by device:
on a CPU a step over many small tensors is all per-tensor cost.
"""

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from lightning_dpipe.profiling.clock import Clock

_NUM_TENSORS = 16
_SMALL_NUMEL = 256
_LARGE_NUMEL = 1 << 18
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Linear cost of a step."""

    per_tensor_us: float
    per_byte_us: float

    def step_us(self, num_tensors: int, num_bytes: int) -> int:
        """Step time over `num_tensors` weights of `num_bytes` together."""
        return round(num_tensors * self.per_tensor_us + num_bytes * self.per_byte_us)


def measure_optimizer(clock: Clock, device: torch.device) -> OptimizerCost:
    """Time AdamW (torch's default implementation on `device`) on small and on large tensors."""
    small_us = _step_us(clock, device, _SMALL_NUMEL)
    large_us = _step_us(clock, device, _LARGE_NUMEL)
    small_bytes, large_bytes = (4 * _NUM_TENSORS * n for n in (_SMALL_NUMEL, _LARGE_NUMEL))
    per_byte_us = max(0.0, (large_us - small_us) / (large_bytes - small_bytes))
    per_tensor_us = max(0.0, small_us - small_bytes * per_byte_us) / _NUM_TENSORS
    return OptimizerCost(per_tensor_us=per_tensor_us, per_byte_us=per_byte_us)


def _step_us(clock: Clock, device: torch.device, numel: int) -> float:
    weights = [nn.Parameter(torch.zeros(numel, device=device)) for _ in range(_NUM_TENSORS)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights)
    times_us = [clock.measure(optimizer.step)[1] for _ in range(_REPEATS + 1)]
    return statistics.median(times_us[1:])  # the first one makes the optimizer's state

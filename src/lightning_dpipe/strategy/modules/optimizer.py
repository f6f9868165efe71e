"""AdamW with warm-up and decay, as the recipes configure it.

In:     a module whose trainer knows how many steps it will make.
Out:    what ``configure_optimizers`` returns.

A stage's optimizer lists every trained parameter, also those that live on other stages: they never
get a gradient, and the numbering in checkpoints is the single-process one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

from lightning_dpipe.core.errors import DPipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Learning rate over steps: linear to `lr` in `warmup_steps`, then as `decay` says to `end`.

    `end` is a share of `lr`, reached at the trainer's last step.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    end: float = 0.0

    def build(self, module: LightningModule) -> OptimizerLRSchedulerConfig:
        """Optimizer and its schedule, stepped once per optimizer step.

        Raises:
            DPipeError: Decay without an end: the trainer has no max_steps or max_epochs.
        """
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            weight_decay=self.weight_decay,
            eps=self.eps,
        )
        num_steps = math.inf
        if self.decay != "constant":
            num_steps = module.trainer.estimated_stepping_batches
            if math.isinf(num_steps):
                raise DPipeError(
                    f"decay={self.decay!r} needs to know when training ends, but max_steps and "
                    "max_epochs are both unlimited; set trainer.max_steps=N, or decay=constant"
                )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.factor(step, num_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"},
        }

    def factor(self, step: int, num_steps: float) -> float:
        """Learning rate of optimizer step `step` (from 0) of `num_steps`, as a share of `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        done = (step - self.warmup_steps) / max(num_steps - self.warmup_steps, 1)
        left = 1.0 - min(done, 1.0)
        if self.decay == "cosine":
            left = 0.5 * (1.0 - math.cos(math.pi * left))
        return self.end + (1.0 - self.end) * left

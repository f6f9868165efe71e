"""The whole model on rank 0, for a moment: what a stage lacks is put in, then taken out again.

In:     a module that a strategy may have cut (absent weights on meta).
Out:    the same module with complete weights inside a ``with`` block, e.g. to draw samples.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn


def gather_weights(trainer: Trainer) -> dict[str, Any]:
    """The whole ``state_dict`` on rank 0, possibly nothing elsewhere. Call it on every rank."""
    return trainer.strategy.lightning_module_state_dict()


@contextmanager
def whole_weights(module: LightningModule, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the block in eval mode with `weights` (by full name) in place of the module's own.

    Names that `weights` lacks keep what they have.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, owner in module.named_modules():
        for name, own in list(owner._parameters.items()):
            full = f"{prefix}.{name}" if prefix else name
            if own is not None and full in weights:
                value = weights[full].detach().to(module.device, own.dtype)
                owner._parameters[name] = nn.Parameter(value, requires_grad=False)
                replaced.append((owner, name, own))
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for owner, name, own in replaced:
            owner._parameters[name] = own
        module.train(was_training)

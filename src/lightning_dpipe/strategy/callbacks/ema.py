"""Exponential moving average of the weights, each rank averaging its own stage, in float32.

In:     the weights after every optimizer step.
Out:    averaged weights by full name, whole on rank 0 and in the checkpoint, where they are kept
        beside the weights and never in their place; validation and tests run with them.
Source: the warm-up of the decay, ``(1 + t) / (10 + t)``, is TensorFlow's ``num_updates`` rule.

In bfloat16 an average with decay 0.9999 never moves: the steps are below its resolution.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.collectives import HostLink, move_to_root


class EMA(Callback):
    """Keep averaged weights for validation, sampling and checkpoints.

    Args:
        decay: Weight of the past; reached after about ``10 / (1 - decay)`` steps.
        evaluate: Whether validation and tests run with the average, so that ``val/loss`` is that of
            the weights that will be used; False: with the weights as they are.

    Raises:
        DPipeError: `decay` is not in ``[0, 1)``.
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise DPipeError(f"EMA decay is {decay}; expected a value in [0, 1), such as 0.999")
        self.decay = decay
        self.evaluate = evaluate
        self.num_updates = 0
        self.average: dict[str, Tensor] = {}
        self._link: HostLink | None = None
        self._restored: Mapping[str, Any] | None = None
        self._raw: dict[torch.nn.Parameter, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier run's average: a checkpoint may arrive before training starts."""
        self.average = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the weights as they are, or with what a checkpoint has brought already.

        A strategy that cuts the model reads the checkpoint after this hook, others before it.
        """
        self._begin(trainer, pl_module)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the average if the optimizer stepped."""
        if trainer.global_step == self.num_updates:
            return
        self.num_updates = trainer.global_step
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, p in _own(pl_module).items():
            self.average[name].lerp_(p.detach().float(), 1.0 - decay)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate with the average; outside a fit with what a checkpoint has brought, if any."""
        if not self.evaluate:
            return
        if not self.average and self._restored is not None:
            self._begin(trainer, pl_module)
        for name, p in _own(pl_module).items():
            if name in self.average:
                # Another tensor under the parameter: the weights themselves are not touched.
                self._raw[p] = p.data
                p.data = self.average[name].to(p.dtype, copy=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the weights as they were."""
        for p, raw in self._raw.items():
            p.data = raw
        self._raw = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As in validation."""
        self.on_validation_start(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As in validation."""
        self.on_validation_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """A checkpoint written on the way out holds the weights, not the average."""
        self.on_validation_end(trainer, pl_module)

    def gather(self) -> dict[str, Tensor]:
        """All averaged weights on rank 0, nothing elsewhere. Call it on every rank."""
        link = self._link
        if link is None or link.world_size == 1:
            return dict(self.average)
        owners: dict[str, int] = {}
        for rank, names in enumerate(link.gather_objects(list(self.average))):
            for name in names:
                owners.setdefault(name, rank)
        arrived = move_to_root(link, self.average, owners)
        return {**self.average, **arrived} if link.rank == 0 else {}

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint keeps, whole on rank 0. Lightning calls it on every rank."""
        return {"num_updates": self.num_updates, "average": self.gather()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part out of the whole.

        Raises:
            DPipeError: The file lacks an averaged weight of this model.
        """
        if self.average:
            self._restore(state_dict)
        else:
            self._restored = state_dict

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._link = getattr(trainer.strategy, "link", None) or HostLink()
        self.num_updates = 0
        self.average = {name: p.detach().clone().float() for name, p in _own(pl_module).items()}
        if self._restored is not None:
            self._restore(self._restored)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._restored = None
        self.num_updates = int(state["num_updates"])
        for name, value in self.average.items():
            if name not in state["average"]:
                raise DPipeError(
                    f"the checkpoint has no averaged weight {name!r}; it is of another model: "
                    "resume with the model it was saved from, or remove the EMA callback"
                )
            value.copy_(state["average"][name])


def _own(module: LightningModule) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in module.named_parameters() if p.requires_grad and not p.is_meta}

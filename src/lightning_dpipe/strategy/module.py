"""`DiffusionModule`: the LightningModule that a user writes once and trains under any strategy.

In:     ``configure_model`` builds modules, ``pipeline_spec`` lists layers over named tensors,
        ``configure_optimizers`` as always.
Out:    training, validation, test and predict steps. Under `DiffusionPipeStrategy` the strategy
        runs the spec's stages; under any other one the steps here run it in one process.

Draw keys: every random draw is keyed by ``(batch, slot)``. In training `batch` counts the batches
consumed since the start (checkpointed) and ``slot = i * world_size + rank`` is the position in the
global batch. In evaluation ``batch = -(1 + loader)`` and `slot` is the position in the loader, so
that validation noise is the same in every epoch, for every batch size and number of ranks.
"""

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.deferred import current_recording
from lightning_dpipe.models.spec import DRAW_KEY, PipelineSpec
from lightning_dpipe.models.turns import taking_turns
from lightning_dpipe.objective.draws import at_level, coin
from lightning_dpipe.strategy.later import Later, build_later, needed_everywhere
from lightning_dpipe.strategy.local import num_samples, sample_losses, select_fields
from lightning_dpipe.strategy.turns import node_turns

_CONSUMED = "dpipe_batches_consumed"


class DiffusionModule(LightningModule):
    """A model whose steps come from its `pipeline_spec`.

    Args:
        seed: Key of every random draw (noise, timesteps, dropout of captions, coins). By default
            the seed of `seed_everything`, else 0.

    Example:
        >>> class Mine(DiffusionModule):
        ...     def configure_model(self): ...
        ...     def pipeline_spec(self): ...
        ...     def configure_optimizers(self): ...
    """

    def __init__(self, *, seed: int | None = None) -> None:
        super().__init__()
        self.batches_consumed = 0
        self._given_seed = seed
        self._spec: PipelineSpec | None = None
        self._frozen_modules: tuple[nn.Module, ...] = ()
        self._evaluated: tuple[dict[str, Tensor], bool] | None = None
        self.later: Later | None = None  # weights that a strategy fills in once it has a plan
        self._seen: dict[int, int] = {}  # loader -> this rank's samples before the current batch

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "configure_model" in cls.__dict__:
            # Frozen weights must be marked before a strategy wraps the module or asks for the
            # optimizer; Lightning has no hook between configure_model and that.
            cls.configure_model = _prepared_after(cls.configure_model)  # type: ignore[method-assign, assignment]

    @property
    def seed(self) -> int:
        """Key of all draws."""
        if self._given_seed is not None:
            return self._given_seed
        return int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def pipeline_spec(self) -> PipelineSpec:
        """Describe the model: frozen components, backbones and losses over named tensors."""
        raise SpecError(
            f"{type(self).__name__} has no pipeline_spec(); define it and return a PipelineSpec "
            "whose layers use the modules that configure_model() built"
        )

    def to_pipeline(self) -> Any:
        """A diffusers pipeline of the module's parts, for `dpipe export`; None: there is none."""
        return None

    @property
    def spec(self) -> PipelineSpec:
        """The spec, made once after `configure_model`."""
        if self._spec is None:
            self.prepare_spec()
        assert self._spec is not None
        return self._spec

    def prepare_spec(self) -> None:
        """Make the spec and freeze its frozen components: no gradients, eval mode for ever."""
        spec = self.pipeline_spec()
        if not isinstance(spec, PipelineSpec):
            raise SpecError(
                f"pipeline_spec() of {type(self).__name__} returned a {type(spec).__name__}; "
                "return a PipelineSpec"
            )
        for component in spec.frozen:
            for layer in component.layers:
                for parameter in layer.parameters():
                    parameter.requires_grad_(False)
        still = [layer for component in spec.frozen for layer in component.layers]
        for backbone in spec.backbones:
            for layer in backbone.layers:
                weights = layer.parameters()
                if weights and not any(p.requires_grad for p in weights):
                    still.append(layer)
        # A tuple, so that nn.Module does not register them a second time under another name.
        self._frozen_modules = _with_parents(self, {m for layer in still for m in layer.modules()})
        self._spec = spec
        self.train(self.training)

    def train(self, mode: bool = True) -> "DiffusionModule":
        """Set the mode of trained parts only: `trainer.validate` must not wake the encoders."""
        super().train(mode)
        for module in getattr(self, "_frozen_modules", ()):
            module.training = False
        return self

    def training_keys(self, count: int, ahead: int = 0) -> Tensor:
        """Draw keys int64 ``[count, 2]`` of this rank's batch, `ahead` batches from now."""
        rank, world_size = self._place()
        return _draw_keys(self.batches_consumed + ahead, 0, count, rank, world_size)

    def evaluation_keys(self, count: int, batch_idx: int, dataloader_idx: int) -> Tensor:
        """Draw keys int64 ``[count, 2]`` of the next evaluation batch; advances the position."""
        first = 0 if batch_idx == 0 else self._seen.get(dataloader_idx, 0)
        self._seen[dataloader_idx] = first + count
        rank, world_size = self._place()
        return _draw_keys(-(1 + dataloader_idx), first, count, rank, world_size)

    def is_self_conditioned(self, batch: int) -> bool:
        """One coin per global batch, equal on all ranks; `batch` is a draw key's first number."""
        conditioning = self.spec.self_conditioning
        if conditioning is None:
            return False
        return coin(self.seed, "self_conditioning", batch) < conditioning.probability

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Loss of one batch, logged as ``train/loss``."""
        fields = select_fields(self.spec, batch)
        count = num_samples(fields)
        fields[DRAW_KEY] = self.training_keys(count)
        coined = self.is_self_conditioned(self.batches_consumed)
        losses = sample_losses(self.spec, fields, self_conditioned=coined)
        self.batches_consumed += 1
        return self.log_losses("train", {k: v.mean() for k, v in losses.items()}, count)

    def validation_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        """Loss of one batch under fixed noise, logged as ``val/loss``."""
        return self._evaluate("val", batch, batch_idx, dataloader_idx)

    def test_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        """Loss of one batch under fixed noise, logged as ``test/loss``."""
        return self._evaluate("test", batch, batch_idx, dataloader_idx)

    def predict_step(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        """Mean loss of one batch under fixed noise, a scalar."""
        losses, _ = self._evaluation_losses(batch, batch_idx, dataloader_idx)
        return torch.stack([loss.mean() for loss in losses.values()]).sum()

    def losses_at(self, level: int) -> tuple[Tensor, int]:
        """Mean loss of the batch evaluated last with a fixed timestep, and its samples.

        `level` is as in `objective.draws.at_level`. Call it on every rank.
        """
        runner = getattr(getattr(self.trainer.strategy, "installed", None), "runner", None)
        if runner is not None:
            means, count = runner.evaluate_at(level)
        else:
            assert self._evaluated is not None, "a batch was evaluated before"
            fields, coined = self._evaluated
            again = {**fields, DRAW_KEY: at_level(fields[DRAW_KEY], level)}
            losses = sample_losses(self.spec, again, self_conditioned=coined)
            means, count = {k: v.mean() for k, v in losses.items()}, num_samples(fields)
        return functools.reduce(torch.add, means.values()), count

    def log_losses(self, stage: str, means: Mapping[str, Tensor], count: int) -> Tensor:
        """Log the total and, with several backbones, each one's loss; return the total.

        `means` are over `count` samples. Values that are already global are the same on all ranks,
        so that reducing them again changes nothing.
        """
        training = stage == "train"
        total = functools.reduce(torch.add, means.values())
        rows = {f"{stage}/loss": total}
        if len(means) > 1:
            rows |= {f"{stage}/loss/{name}": value for name, value in means.items()}
        for name, value in rows.items():
            self.log(
                name,
                value.detach(),
                prog_bar=name == f"{stage}/loss",
                on_step=training,
                on_epoch=not training,
                batch_size=count,
                sync_dist=not (training and getattr(self.trainer.strategy, "logs_global", False)),
                add_dataloader_idx=True,
            )
        return total

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the number of batches consumed, which keys the draws (an override calls super)."""
        checkpoint[_CONSUMED] = self.batches_consumed

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting where the checkpoint stopped (an override calls super)."""
        self.batches_consumed = int(checkpoint.get(_CONSUMED, 0))

    def _evaluate(
        self, stage: str, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int
    ) -> Tensor:
        losses, count = self._evaluation_losses(batch, batch_idx, dataloader_idx)
        return self.log_losses(stage, {k: v.mean() for k, v in losses.items()}, count)

    def _evaluation_losses(
        self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int
    ) -> tuple[dict[str, Tensor], int]:
        fields = select_fields(self.spec, batch)
        count = num_samples(fields)
        fields[DRAW_KEY] = self.evaluation_keys(count, batch_idx, dataloader_idx)
        coined = self.is_self_conditioned(-(1 + dataloader_idx))
        self._evaluated = (fields, coined)
        return sample_losses(self.spec, fields, self_conditioned=coined), count

    def _place(self) -> tuple[int, int]:
        if self._trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size


def _with_parents(root: nn.Module, frozen: set[nn.Module]) -> tuple[nn.Module, ...]:
    """Add the modules that hold frozen ones only (a text model around its layers)."""
    for module in reversed([m for m in root.modules() if m is not root]):
        children = list(module.children())
        if children and not list(module.parameters(recurse=False)) and set(children) <= frozen:
            frozen.add(module)
    return tuple(frozen)


def _draw_keys(batch: int, first: int, count: int, rank: int, world_size: int) -> Tensor:
    slots = torch.arange(first, first + count, dtype=torch.int64) * world_size + rank
    return torch.stack([torch.full_like(slots, batch), slots], dim=1)


def _prepared_after(configure_model: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(configure_model)
    def configure_and_prepare(self: DiffusionModule) -> None:
        turns = None if self._trainer is None else node_turns(self._trainer.local_rank)
        with nullcontext() if turns is None else taking_turns(turns):
            configure(self)

    def configure(self: DiffusionModule) -> None:
        strategy: Any = None if self._trainer is None else self._trainer.strategy
        nested = current_recording() is not None  # called by a subclass's own
        if nested or not getattr(strategy, "defers_weights", False):
            configure_model(self)
            self.prepare_spec()
            return
        later = build_later(self, lambda: configure_model(self), strategy.link)
        self.prepare_spec()
        if later is not None:
            later.fill(needed_everywhere(self, self.spec))
            self.later = later

    return configure_and_prepare

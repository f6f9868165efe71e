"""`DiffusionPipeStrategy`: planned pipeline training behind Lightning's Trainer.

In:     a DiffusionModule and whatever of the plan the user wants to fix.
Out:    the Trainer's usual behaviour (same batches as DDP, same losses, same checkpoint file), the
        model's layers spread over the ranks.

Data as under DDP: every rank loads its own shard and encodes its own samples. Global rank 0 is the
last stage of its pipeline, so it has the loss. The back-propagation happens inside `training_step`;
`gradients` says how that goes together with Lightning's `zero_grad`.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.planning.opposite import Cuts
from lightning_dpipe.planning.search import Auto
from lightning_dpipe.runtime.reduce import open_reducer
from lightning_dpipe.strategy import checkpoint as files
from lightning_dpipe.strategy.batch_size import find_batch_size
from lightning_dpipe.strategy.cache.recall import attach
from lightning_dpipe.strategy.clipping import clip_by_norm, total_norm
from lightning_dpipe.strategy.gradients import GradientStash
from lightning_dpipe.strategy.installed import Installation
from lightning_dpipe.strategy.loaders import fills_bubbles, wrap_loader
from lightning_dpipe.strategy.lookahead import Outlooks
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.planned import PlanOptions, Setting
from lightning_dpipe.strategy.ranks import RankedStrategy, move
from lightning_dpipe.strategy.recorder import Recorder
from lightning_dpipe.strategy.refusals import (
    check_early_encoding,
    check_module,
    check_optimizers,
    check_several,
    check_trainer,
)
from lightning_dpipe.strategy.replan import replanner_of
from lightning_dpipe.strategy.steps import StepRunner

log = logging.getLogger(__name__)


class DiffusionPipeStrategy(RankedStrategy):
    """Pipeline over all devices, or over groups of `num_stages` devices that replicate it.

    Args:
        num_stages: Devices of one pipeline; by default all ranks. World size must be a multiple.
            "auto" searches for the fastest plan: stages, replicas and micro-batches.
        num_microbatches: Parts of a pipeline's joint batch, or "auto"; by default 4 x stages, at
            most its samples. (`accumulate_grad_batches` counts whole global batches.)
        schedule: Name of the order of forward and backward work.
        plan: A plan, or the file of one (`dpipe plan`): decides all of the above.
        profile: A profile, or the file of one, instead of measuring the model.
        cuts: First layer of every stage but the first; by backbone if there are several.
        device_kinds: How devices of unequal speed are told apart: by ``"name"``, or by measured
            ``"time"`` too; see `strategy.devices`.
        batch_size: Samples per device, if the loader does not say.
        replan_every_n_steps: Steps after which filled bubbles are filled anew from measured times.
        defer_weights: Make a rank's weights after the plan: it never holds those of other stages.
        weights_only: As in ``torch.load``, to resume: Lightning does not hand the Trainer's own on.
        process_group_backend: ``gloo``, ``nccl``; by default what the device needs.
        timeout: After which a collective that waits gives up.
    """

    def __init__(
        self,
        *,
        num_stages: int | Auto | None = None,
        num_microbatches: int | Auto | None = None,
        schedule: str = "1f1b",
        plan: Plan | Path | str | None = None,
        profile: Profile | Path | str | None = None,
        cuts: Cuts | None = None,
        device_kinds: str = "name",
        batch_size: int | None = None,
        replan_every_n_steps: int | None = None,
        weights_only: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **lightning: Any,
    ) -> None:
        super().__init__(backend=process_group_backend, timeout=timeout, **lightning)
        self.options = PlanOptions(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            plan=Path(plan) if isinstance(plan, str) else plan,
            profile=Path(profile) if isinstance(profile, str) else profile,
            cuts=tuple(cuts) if isinstance(cuts, Sequence) else cuts,
            device_kinds=device_kinds,
            replan_every_n_steps=replan_every_n_steps,
        )
        self.logs_global = True  # losses are equal on all ranks: nothing to reduce when logging
        self.recorder: Recorder | None = None
        self.grad_norm: Tensor | None = None
        self._batch_size = batch_size
        self._weights_only = weights_only
        self._installed: Installation | None = None
        self._outlooks = Outlooks()
        self._stash: GradientStash | None = None
        self._reduces = True

    # The plan

    @property
    def installed(self) -> Installation:
        """Plan, session and step runner, from `setup` on."""
        assert self._installed is not None, "the strategy is not set up yet"
        return self._installed

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.installed.built.plan

    @property
    def settled_plan(self) -> Plan:
        """The plan in use, or the one before it while new fills are on trial."""
        replanner = self.installed.runner.replanner
        return self.plan if replanner is None else replanner.settled

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes a backbone's loss."""
        _, device = self.plan.locate(self.global_rank)
        return any(chain[-1] in self.plan.stages_on(device) for chain in self.plan.chains)

    @property
    def replica_group(self) -> Any:
        """Ranks with the same stages as this one; None if there are no others."""
        return None if self._installed is None else self._installed.replicas

    @property
    def failed_at(self) -> str:
        """What this rank was doing when it failed."""
        return "" if self._installed is None else self._installed.session.engine.position

    def name_of(self, rank: int) -> str:
        """A rank with its stages, once there is a plan."""
        if self._installed is None:
            return f"rank {rank}"
        stages = ", ".join(map(str, self.plan.stages_on(self.plan.locate(rank)[1])))
        return f"rank {rank} (stage {stages})"

    # Setup

    def setup_environment(self) -> None:
        """Refuse what cannot work, then connect the ranks."""
        module = self.lightning_module
        assert module is not None
        check_module(module)
        check_trainer(module.trainer, self.accelerator, self._layer_sync)
        self.options.check(self.num_nodes * self.num_processes)
        super().setup_environment()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """The cut happens in `setup`; a checkpoint is read into the cut model."""
        return True

    def setup(self, trainer: Any) -> None:
        """Plan, cut the model, and make the optimizer of this rank's part."""
        module = self._module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self._precision_plugin is None:
            self._precision_plugin = Precision()
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        fitting = trainer.state.fn == TrainerFn.FITTING
        fill = fitting and fills_bubbles(trainer)
        if fill:
            check_early_encoding(trainer, module)
        self._install(self._setting(trainer, fill=fill))
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _setting(self, trainer: Any, *, fill: bool) -> Setting:
        precision = str(self.precision_plugin.precision)
        return Setting(
            world_size=self.world_size,
            batch_size=find_batch_size(
                trainer,
                given=self._batch_size,
                planned=None if self._installed is None else self.plan.batch_size,
                link=self.link,
            ),
            device=self.root_device,
            precision=precision,
            autocast=torch.bfloat16 if precision == "bf16-mixed" else None,
            fill=fill,
            training=trainer.state.fn == TrainerFn.FITTING,
        )

    def _install(self, setting: Setting) -> None:
        module = self._module
        reducer = partial(open_reducer, rank=self.global_rank, device=self.root_device)
        runner = partial(StepRunner, prepare=self._prepare_next, outlooks=self._outlooks)
        self._installed = Installation.of(module, self.options, setting, self.link, reducer, runner)
        attach(self._installed, module, setting, self.link, self._outlooks)
        self._stash = None
        if module.trainer.state.fn == TrainerFn.FITTING:
            built = self._installed.built
            self._installed.runner.replanner = replanner_of(
                self.options.replan_every_n_steps,
                plan=built.plan,
                profile=built.profile,
                link=self.link,
                adopt=self._adopt,
            )

    def _adopt(self, plan: Plan, profile: Profile) -> None:
        self._installed = self.installed.refilled(self._module, plan, profile)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call `configure_optimizers` on the cut model: same names and order as uncut."""
        self.optimizers = []
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            check_several(error)
            raise
        check_optimizers(self.optimizers)
        self._stash = GradientStash([p for p in self._module.parameters() if p.requires_grad])

    def model_to_device(self) -> None:
        """Move what this rank holds; absent weights stay absent."""
        move(self._module, self.root_device)

    @property
    def _module(self) -> DiffusionModule:
        module = self.lightning_module
        assert isinstance(module, DiffusionModule)
        return module

    # Data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wrap a loader so that all ranks agree on its batches; in training look one ahead."""
        return wrap_loader(
            dataloader,
            self._module.trainer,
            spec=self._module.spec,
            link=self.link,
            outlooks=self._outlooks,
        )

    def _prepare_next(self, batch: Any) -> Any:
        """Bring the batch that was looked ahead at to the device, as Lightning will do itself."""
        return self.batch_to_device(self.precision_plugin.convert_input(batch), dataloader_idx=0)

    def on_train_start(self) -> None:
        """Restore a stateful loader: its loop was set up before the checkpoint was read."""
        self._module.trainer.fit_loop._load_combined_loader_states()

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the schedule on one batch: forward, backward, and frozen work of the next one."""
        module, stash = self._module, self._stash
        assert stash is not None
        batch, batch_idx = args[0], args[1]
        accumulate = module.trainer.accumulate_grad_batches
        first = batch_idx % accumulate == 0  # Lightning's own test for calling zero_grad
        stash.before(first=first)
        with self.precision_plugin.train_step_context():
            means, total = self.installed.runner.train(
                batch, accumulate=accumulate, reduce=self._reduces
            )
        stash.after(first=first)
        if self.installed.runner.replanned:
            module.log_dict(dict(self.installed.runner.replanned), on_step=True, on_epoch=False)
        return module.log_losses("train", means, total)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Put the step's gradients in place and finish their sum over the replicas."""
        assert self._stash is not None
        loss = self.precision_plugin.pre_backward(closure_loss, self._module)
        self._stash.deposit()
        if self._reduces:
            with self._recorded(Activity.SYNC, "gradient sum"):
                self.installed.session.wait_reduction()
        return self.precision_plugin.post_backward(loss, self._module)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """In an accumulation window only the last micro-step sums over the replicas."""
        self._reduces = False
        try:
            yield
        finally:
            self._reduces = True

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """As always; a recorder also gets the time that the update itself takes."""
        recorder = self.recorder
        if recorder is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        start_ns = 0

        def timed() -> Any:
            nonlocal start_ns
            result = closure()
            start_ns = recorder.now_ns()
            return result

        result = super().optimizer_step(optimizer, timed, model, **kwargs)
        recorder.add(start_ns, Activity.OPTIMIZER, "optimizer step")
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one batch forward only."""
        return self._evaluate("val", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one batch forward only."""
        return self._evaluate("test", *args, **kwargs)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Mean loss of the global batch, a scalar, the same on all ranks."""
        with self.precision_plugin.predict_step_context():
            means, _ = self.installed.runner.evaluate(batch, batch_idx, dataloader_idx)
        return torch.stack(list(means.values())).sum()

    def _evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        with self.precision_plugin.val_step_context():
            means, total = self.installed.runner.evaluate(batch, batch_idx, dataloader_idx)
        return self._module.log_losses(stage, means, total)

    def on_validation_end(self) -> None:
        """Forget batches that were announced but not run."""
        self._outlooks.evaluation.clear()

    on_test_end = on_predict_end = on_validation_end

    def total_norm(self, optimizer: Optimizer) -> Tensor:
        """Norm of the whole model's gradient, the same on all ranks. Collective."""
        return total_norm(files.parameters_of(optimizer), self.link, self.root_device)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = files.parameters_of(optimizer)
        self.grad_norm = clip_by_norm(parameters, float(clip_val), self.link, self.root_device)

    @contextmanager
    def _recorded(self, activity: Activity, label: str) -> Generator[None, None, None]:
        recorder = self.recorder
        start_ns = recorder.now_ns() if recorder is not None else 0
        yield
        if recorder is not None:
            recorder.add(start_ns, activity, label)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0, in the single process's order; nothing elsewhere."""
        return files.gather_model_state(self._module, self.link)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state on rank 0; nothing elsewhere."""
        return files.gather_optimizer_state(getattr(optimizer, "_optimizer", optimizer), self.link)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a checkpoint file on every rank."""
        chosen = self._weights_only if weights_only is None else weights_only
        kwargs = {} if chosen is None else {"weights_only": chosen}
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **kwargs)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's weights out of a complete checkpoint."""
        files.load_model_state(self._module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's optimizer state out of a complete checkpoint."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            files.load_optimizer_state(optimizer, state)
        _optimizers_to_device(self.optimizers, self.root_device)

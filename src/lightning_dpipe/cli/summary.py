"""What a training run is and what it was, on the console of rank 0.

In:     the strategy's plan, what the other callbacks measured and drew.
Out:    a few lines when training starts, and a few when it is over.
"""

import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.strategy.callbacks.ledger import Ledger
from lightning_dpipe.strategy.callbacks.plan_artifact import PlanArtifact
from lightning_dpipe.strategy.callbacks.samples import Drawn, SampleGrid
from lightning_dpipe.strategy.callbacks.unfilled import UnfilledProbe
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.host_memory import peak_host_bytes
from lightning_dpipe.strategy.loaders import loader_batch_size
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy

NUM_WARMUP_STEPS = 3

C = TypeVar("C", bound=Callback)


class RunSummary(Callback):
    """Goes last in the list of callbacks, so that the others have finished.

    Args:
        folder: The run's output folder, named at the end.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._measured: list[float] = []
        self._seen: Timeline | None = None
        self._num_steps = 0
        self._start_s = self._end_s = 0.0
        self._peaks_before: tuple[int, ...] = ()
        self._link: HostLink | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say what will run."""
        self._num_steps = 0
        self._peaks_before = self._peaks(trainer)
        if trainer.is_global_zero:
            _show(self._before(trainer, pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count steps after the first few, and keep what the ledger measured."""
        self._num_steps += 1
        self._end_s = time.monotonic()
        if self._num_steps == NUM_WARMUP_STEPS:
            self._start_s = self._end_s
        ledger = _find(trainer, Ledger)
        if ledger is not None and ledger.timeline is not self._seen:
            self._seen = ledger.timeline
            if self._seen is not None:
                self._measured.append(self._seen.bubble_ratio)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what ran and where everything is."""
        peaks = self._peaks(trainer)
        if trainer.is_global_zero:
            text = f"at most {_gib(peaks)} (to make the model {_gib(self._peaks_before)})"
            _show(self._after(trainer) | {"host memory": text})

    def _peaks(self, trainer: Any) -> tuple[int, ...]:
        """Peak host memory so far, by rank. Collective."""
        self._link = self._link or getattr(trainer.strategy, "link", None) or HostLink()
        return self._link.gather(peak_host_bytes())

    def _before(self, trainer: Any, module: Any) -> dict[str, str]:
        batch_size, world_size = _batch_size(trainer), trainer.world_size
        shape = f"{world_size} ranks"
        plan = trainer.strategy.plan if _is_pipeline(trainer) else None
        if plan is not None:
            rows = max(split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches))
            shape = (
                f"{world_size} ranks = {len(plan.groups)} x {plan.num_devices} devices, "
                f"{plan.stage_counts} stages, {plan.schedule}, {plan.num_microbatches} "
                f"micro-batches of {rows}"
            )
        lines = {"world": shape}
        if batch_size is not None:
            lines["batch"] = (
                f"{batch_size * world_size} samples per step ({batch_size} per device), "
                f"{trainer.num_training_batches} steps per epoch"
            )
        predicted = _predicted(trainer)
        if predicted is not None:
            lines["bubble"] = (
                f"predicted {predicted[0].bubble_ratio:.1%} with the frozen work up front, "
                f"{predicted[1].bubble_ratio:.1%} with it in the bubbles"
            )
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
        lines["weights"] = f"{trained / 1e6:.2f} M trained, {frozen / 1e6:.2f} M frozen"
        return lines

    def _after(self, trainer: Any) -> dict[str, str]:
        lines = {"bubble": self._bubbles(trainer), "speed": self._speed(trainer)}
        grid = _find(trainer, SampleGrid)
        if grid is not None and grid.drawn is not None:
            lines["ranks"] = _ranks(grid.drawn)
            lines["samples"] = str(grid.drawn.path)
        ledger = _find(trainer, Ledger)
        if ledger is not None and ledger.picture_path is not None:
            lines["timeline"] = str(ledger.picture_path)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.last_model_path:
                lines["checkpoint"] = callback.last_model_path
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                run_folder = Path(logger.experiment.dir).parent
                lines["W&B run"] = run_line(run_folder, offline=logger._offline)
        lines["folder"] = str(self.folder)
        return {name: text for name, text in lines.items() if text}

    def _bubbles(self, trainer: Any) -> str:
        """Measured and predicted bubble ratios, as far as they are known."""
        probe, predicted = _find(trainer, UnfilledProbe), _predicted(trainer)
        unfilled = probe.timeline.bubble_ratio if probe is not None and probe.timeline else None
        filled = statistics.median(self._measured) if self._measured else None
        parts = []
        for index, (name, ratio) in enumerate((("unfilled", unfilled), ("filled", filled))):
            if ratio is not None:
                plan = f" (predicted {predicted[index].bubble_ratio:.1%})" if predicted else ""
                parts.append(f"{name} {ratio:.1%}{plan}")
        return ", ".join(parts)

    def _speed(self, trainer: Any) -> str:
        steps, batch_size = self._num_steps - NUM_WARMUP_STEPS, _batch_size(trainer)
        if steps < 1 or batch_size is None:
            return ""
        spent_s = self._end_s - self._start_s
        samples = batch_size * trainer.world_size * steps
        return f"{samples / spent_s:.1f} samples/s ({steps} steps in {spent_s:.0f} s)"


def run_line(folder: Path, *, offline: bool) -> str:
    """Where a W&B run is; how to upload it, as a command for a shell, if that is still to do."""
    sync = f" (upload it: wandb sync {shlex.quote(str(folder))})" if offline else ""
    return f"{folder}{sync}"


def _gib(by_rank: Sequence[int]) -> str:
    return ", ".join(f"{peak / 2**30:.2f}" for peak in by_rank) + " GiB"


def _ranks(drawn: Drawn) -> str:
    """How near each sample came: the place of the asked image among all real ones."""
    text = (
        f"for {drawn.hits} of {len(drawn.captions)} samples the nearest of {drawn.num_references} "
        "real images is what was asked"
    )
    if drawn.ranks:
        each = zip(drawn.captions, drawn.ranks, strict=True)
        text += "; places: " + ", ".join(f"{caption} {rank}" for caption, rank in each)
    return text


def _predicted(trainer: Any) -> tuple[Timeline, Timeline] | None:
    plan = _find(trainer, PlanArtifact)
    return None if plan is None else plan.predicted


def _batch_size(trainer: Any) -> int | None:
    if _is_pipeline(trainer):
        size: int = trainer.strategy.plan.batch_size
        return size
    return loader_batch_size([trainer.train_dataloader])


def _is_pipeline(trainer: Any) -> bool:
    return isinstance(trainer.strategy, DiffusionPipeStrategy)


def _find(trainer: Any, kind: type[C]) -> C | None:
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)


def _show(lines: dict[str, str]) -> None:
    text = "\n".join(f"{name:<13}{value}" for name, value in lines.items())
    print(f"\n{text}\n", flush=True)

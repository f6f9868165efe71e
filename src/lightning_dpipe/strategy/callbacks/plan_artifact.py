"""Keep the plan with the run: as files, and as an artifact in W&B (offline runs too).

In:     the strategy's plan and the profile behind it.
Out:    ``plan.json``, ``profile.json`` and ``timeline_predicted.png`` in a folder.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger

from lightning_dpipe.core.jsonio import save
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.render import save_png
from lightning_dpipe.simulation.simulate import simulate
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy


class PlanArtifact(Callback):
    """Save what is about to run. Does nothing under a strategy without a plan.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.predicted: tuple[Timeline, Timeline] | None = None
        self._saved: Plan | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Write and log on rank 0."""
        strategy = trainer.strategy
        if isinstance(strategy, DiffusionPipeStrategy) and trainer.is_global_zero:
            self._save(trainer, strategy)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Again, once new fills have proved themselves."""
        strategy = trainer.strategy
        if self._saved is not None and strategy.plan is strategy.settled_plan is not self._saved:
            self._save(trainer, strategy)

    def _save(self, trainer: Any, strategy: DiffusionPipeStrategy) -> None:
        built = strategy.installed.built
        self._saved = built.plan
        files = [self.folder / "plan.json"]
        save(built.plan, files[0])
        if built.profile is not None:
            files += [self.folder / "profile.json", self.folder / "timeline_predicted.png"]
            save(built.profile, files[1])
            self.predicted = predictions(built.plan, built.profile)
            save_png(self.predicted, files[2], "predicted\nfrozen work up front\nin bubbles")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                _log_files(logger, files)


def predictions(plan: Plan, profile: Profile) -> tuple[Timeline, Timeline]:
    """Predicted iterations: with the frozen work up front, and as planned."""
    schedule = schedule_of(plan)
    return (
        simulate(replace(plan, fills=()), schedule, profile),
        simulate(plan, schedule, profile),
    )


def _log_files(logger: WandbLogger, files: list[Path]) -> None:
    import wandb

    artifact = wandb.Artifact(name="plan", type="plan")
    for file in files:
        artifact.add_file(str(file))
    logger.experiment.log_artifact(artifact)

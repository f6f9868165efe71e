"""`TimestepLosses`: the validation loss at nine fixed timesteps, so that runs can be compared.

In:     validation batches, each evaluated again at quantiles 0.1, 0.2, ... 0.9 of the timesteps.
Out:    ``val/loss_q10`` (little noise) to ``val/loss_q90`` (much), and their curve: a CSV file and
        a picture, in W&B too.

A mean over drawn timesteps is mostly the noise of the draw, and hides that a run gets better at
small timesteps and worse at large ones. Here noise and timestep of a sample never change, so the
numbers of two validations, or of two runs, differ by the weights only.
"""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.objective.draws import NUM_LEVELS
from lightning_dpipe.objective.noise import NoiseDraw
from lightning_dpipe.strategy.module import DiffusionModule

LEVELS = range(1, NUM_LEVELS)


def key_of(level: int) -> str:
    """Name of a level's metric: ``val/loss_q10`` for level 1."""
    return f"val/loss_q{100 * level // NUM_LEVELS}"


class TimestepLosses(Callback):
    """Evaluate the held-out set at fixed timesteps; costs nine more forwards a batch.

    Args:
        folder: Where ``timestep_losses.csv`` and ``.png`` go; None: the logger's folder.
        num_batches: At most so many batches of a validation; None: all.
        picture: Whether to draw the curves.

    Raises:
        UnsupportedError: At the start: the model draws its timesteps in a way of its own.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        num_batches: int | None = None,
        picture: bool = True,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.num_batches = num_batches
        self.picture = picture
        self.curves: dict[int, tuple[float, ...]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a model whose timesteps cannot be fixed before it has trained for hours."""
        self.on_validation_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The same for a validation by itself."""
        spec = pl_module.spec if isinstance(pl_module, DiffusionModule) else None
        layers = [layer for c in spec.frozen for layer in c.layers] if spec is not None else []
        if not any(isinstance(layer.module, NoiseDraw) for layer in layers):
            raise UnsupportedError(
                f"TimestepLosses fixes the timesteps of noise_component(), which "
                f"{type(pl_module).__name__} does not use; use it in pipeline_spec(), or remove "
                "the callback"
            )

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Evaluate the batch again at every level."""
        skipped = self.num_batches is not None and batch_idx >= self.num_batches
        if trainer.sanity_checking or skipped or dataloader_idx > 0:
            return
        assert isinstance(pl_module, DiffusionModule)
        with trainer.precision_plugin.val_step_context():
            for level in LEVELS:
                loss, count = pl_module.losses_at(level)
                pl_module.log(
                    key_of(level),
                    loss.detach(),
                    on_step=False,
                    on_epoch=True,
                    batch_size=count,
                    sync_dist=True,
                    add_dataloader_idx=False,
                )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add this validation's curve to the files."""
        metrics = trainer.callback_metrics
        if trainer.sanity_checking or key_of(1) not in metrics:
            return
        curve = tuple(float(metrics[key_of(level)]) for level in LEVELS)
        self.curves[trainer.global_step] = curve
        folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir)  # asks all ranks
        if trainer.is_global_zero:
            self._write(folder, trainer.global_step, curve)
            if self.picture:
                self._draw(trainer, folder / "timestep_losses.png")

    def state_dict(self) -> dict[str, Any]:
        """The curves so far, so that a resumed run draws them all."""
        return {"curves": self.curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the curves of the run that is resumed."""
        self.curves = dict(state_dict["curves"])

    def _write(self, folder: Path, step: int, curve: tuple[float, ...]) -> None:
        path = folder / "timestep_losses.csv"
        folder.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        with path.open("a", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            if fresh:
                rows.writerow(("step", *(key_of(level) for level in LEVELS)))
            rows.writerow((step, *curve))

    def _draw(self, trainer: Trainer, path: Path) -> None:
        # Without pyplot, which would take over the process's figures.
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        shades = colormaps["viridis"]
        for number, (step, curve) in enumerate(sorted(self.curves.items())):
            shade = shades(number / max(1, len(self.curves) - 1))
            axes.plot([100 * x / NUM_LEVELS for x in LEVELS], curve, color=shade, label=str(step))
        axes.set_xlabel("quantile of the timesteps [%] (right: more noise)")
        axes.set_ylabel("validation loss")
        axes.set_yscale("log")
        if len(self.curves) <= 8:
            axes.legend(title="step")
        FigureCanvasAgg(figure)
        figure.savefig(path)
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image("val/loss_by_timestep", [str(path)])

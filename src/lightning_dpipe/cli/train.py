"""``dpipe train``: build everything a config names and fit.

In: a composed config. Out: what the run is and was, on the console; its files under the output
folder; the value a sweeper optimises.
"""

from collections.abc import Sequence
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.callbacks import LearningRateMonitor
from omegaconf import DictConfig

import lightning_dpipe
from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.logger import build_logger, finished_run, loggable
from lightning_dpipe.cli.parts import (
    build_data,
    build_module,
    build_strategy,
    one_thread_per_rank,
)
from lightning_dpipe.cli.provenance import Provenance
from lightning_dpipe.cli.summary import RunSummary
from lightning_dpipe.core.errors import DPipeError


def run(config: DictConfig, flags: Sequence[str] = ()) -> float | None:
    """Train as `config` says.

    Returns:
        The last value logged as ``config.optimized_metric``; without one the last training loss.

    Raises:
        DPipeError: Nothing chooses a model or data, or the metric was never logged.
    """
    configure_console()
    one_thread_per_rank(config)
    L.seed_everything(config.seed, workers=True, verbose=False)
    strategy = build_strategy(config)
    module, data = build_module(config), build_data(config)
    with finished_run():
        trainer = build_trainer(config, strategy)
        if trainer.logger is not None:
            trainer.logger.log_hyperparams(
                {**loggable(config), "lightning_dpipe": lightning_dpipe.__version__}
            )
        trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    return _metric(trainer, config.optimized_metric)


def build_trainer(config: DictConfig, strategy: Any) -> L.Trainer:
    """Trainer with strategy, callbacks and logger."""
    folder = HydraConfig.get().runtime.output_dir
    logger = build_logger(config)
    recipe = HydraConfig.get().runtime.choices.get("recipe")
    callbacks = build_callbacks(config, logs=logger is not None)
    trainer: L.Trainer = instantiate(
        config.trainer,
        strategy=strategy,
        callbacks=[*callbacks, Provenance(recipe), RunSummary(folder)],
        logger=logger or False,
    )
    return trainer


def build_callbacks(config: DictConfig, *, logs: bool) -> list[L.Callback]:
    """Instantiate ``config.callbacks``; if nothing logs, without those that need a logger."""
    made = [instantiate(c) for c in (config.get("callbacks") or {}).values() if c]
    # Lightning's monitor ends a run that has no logger.
    return [c for c in made if logs or not isinstance(c, LearningRateMonitor)]


def _metric(trainer: Any, name: str | None) -> float | None:
    if name is None:
        loss = trainer.callback_metrics.get("train/loss")
        return None if loss is None else float(loss)
    if name not in trainer.callback_metrics:
        raise DPipeError(
            f"optimized_metric={name!r} was never logged; the run logged: "
            f"{', '.join(sorted(trainer.callback_metrics))}"
        )
    return float(trainer.callback_metrics[name])

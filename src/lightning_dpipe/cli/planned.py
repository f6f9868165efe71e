"""Plan a config's model in this process, without a Trainer: the start of ``plan`` and ``verify``.

In: a composed config. Out: the module, its data and the plan that training on ``trainer.devices``
ranks would use, whether or not this machine has as many.
"""

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.parts import (
    build_data,
    build_module,
    build_strategy,
    num_devices,
    one_thread_per_rank,
)
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.loaders import loader_batch_size
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.planned import Built, PlanOptions, Setting, build
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model on its device, and what is known before anything is measured."""

    module: DiffusionModule
    loader: Any
    options: PlanOptions
    setting: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A model ready to run in this process, and how it would run on its ranks."""

    module: DiffusionModule
    loader: Any
    device: torch.device
    built: Built
    options: PlanOptions
    setting: Setting


def prepare_config(config: DictConfig) -> Prepared:
    """Build model and data, and put the model on its device.

    Raises:
        DPipeError: The strategy has no pipeline, or the loader does not tell its batch size.
        PlanError: World and stages do not fit each other.
    """
    configure_console()
    one_thread_per_rank(config)
    strategy = build_strategy(config)
    if not isinstance(strategy, DiffusionPipeStrategy):
        raise DPipeError(
            f"strategy {type(strategy).__name__} has no plan; use strategy=diffusionpipe"
        )
    world_size = num_devices(config) * config.trainer.num_nodes
    L.seed_everything(config.seed, workers=True, verbose=False)
    module, data = build_module(config), build_data(config)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    device = torch.device(
        "cuda" if config.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    )
    module.configure_model()
    module.to(device)
    setting = Setting(
        world_size=world_size,
        batch_size=_batch_size(config, strategy, loader),
        device=device,
        precision=str(config.trainer.precision),
        autocast=torch.bfloat16 if config.trainer.precision == "bf16-mixed" else None,
        fill=fills_bubbles(config),
    )
    return Prepared(module=module, loader=loader, options=strategy.options, setting=setting)


def plan_config(config: DictConfig) -> Planned:
    """Prepare, measure the layers (or read the cache), and plan.

    Raises:
        DPipeError: As `prepare_config`.
        PlanError: World, batch and stages do not fit each other.
    """
    prepared = prepare_config(config)
    options, setting = prepared.options, prepared.setting
    built = build(prepared.module.spec, options, setting, HostLink())
    return Planned(
        module=prepared.module,
        loader=prepared.loader,
        device=setting.device,
        built=built,
        options=options,
        setting=setting,
    )


def fills_bubbles(config: DictConfig) -> bool:
    """Whether the config's callbacks include BubbleFill."""
    name = f"{BubbleFill.__module__}.{BubbleFill.__qualname__}"
    callbacks = (config.get("callbacks") or {}).values()
    return any(c and c.get("_target_") == name for c in callbacks)


def _batch_size(config: DictConfig, strategy: DiffusionPipeStrategy, loader: Any) -> int:
    told = loader_batch_size([loader])
    if config.batch_size is not None and told not in (None, config.batch_size):
        raise DPipeError(
            f"batch_size={config.batch_size}, but the loader makes batches of {told}; "
            "set the batch size where your data takes it"
        )
    size = strategy._batch_size or told or config.batch_size
    if size is None:
        raise DPipeError("the loader does not tell its batch size; give batch_size=N")
    return int(size)

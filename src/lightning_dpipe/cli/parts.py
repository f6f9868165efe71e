"""Build the parts that every subcommand needs from a config."""

import os
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_dpipe.cli.paths import recipe_names
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy


def build_module(config: DictConfig) -> DiffusionModule:
    """Instantiate ``config.model``.

    Raises:
        DPipeError: No model is chosen, or it is no DiffusionModule.
    """
    module = _build(config, "model")
    if not isinstance(module, DiffusionModule):
        raise DPipeError(
            f"model._target_ makes a {type(module).__name__}, which is not a DiffusionModule; "
            "derive it from lightning_dpipe's DiffusionModule"
        )
    return module


def build_data(config: DictConfig) -> Any:
    """Instantiate ``config.data``.

    Raises:
        DPipeError: No data is chosen.
    """
    return _build(config, "data")


def build_strategy(config: DictConfig, world_size: int | None = None) -> Any:
    """Instantiate ``config.strategy``, and refuse a world it cannot use before ranks are started.

    Raises:
        PlanError: Stages and world do not fit.
        ScheduleError: The schedule is unknown.
    """
    strategy = instantiate(config.strategy)
    if isinstance(strategy, DiffusionPipeStrategy):
        here = num_devices(config) * config.trainer.num_nodes
        strategy.options.check(here if world_size is None else world_size)
    return strategy


def _build(config: DictConfig, group: str) -> Any:
    if OmegaConf.is_missing(config[group], "_target_"):
        raise DPipeError(
            f"nothing chooses the {group}; give a recipe (recipe=NAME with one of "
            f"{', '.join(recipe_names())}) or {group}._target_=your_package.YourClass"
        )
    return instantiate(config[group], _convert_="all")


def one_thread_per_rank(config: DictConfig) -> None:
    """On a CPU shared by several ranks, compute with one thread each, unless the user chose.

    Two ranks of two threads on two cores take three times as long as two of one.
    """
    ranks = num_devices(config)
    on_gpu = config.trainer.accelerator not in ("cpu", "auto") or (
        config.trainer.accelerator == "auto" and torch.cuda.is_available()
    )
    if ranks == 1 or on_gpu:
        return
    threads = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)


def num_devices(config: DictConfig) -> int:
    """Ranks of one node, counted as Lightning counts ``trainer.devices``."""
    devices = config.trainer.devices
    if devices == 0 or devices == "0" or (isinstance(devices, int) and devices < -1):
        raise DPipeError(f"trainer.devices={devices}; give at least 1, or -1 for all of them")
    if isinstance(devices, int):
        return devices if devices > 0 else _auto_devices(config)
    if isinstance(devices, str) and devices.isdigit():
        return int(devices)
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        raise DPipeError(
            f"trainer.devices={devices!r} is not a number of devices; give one, a list of indices, "
            "or auto"
        )
    return _auto_devices(config) if isinstance(devices, str) else len(devices)


def _auto_devices(config: DictConfig) -> int:
    on_cpu = config.trainer.accelerator == "cpu" or not torch.cuda.is_available()
    return 1 if on_cpu else torch.cuda.device_count()

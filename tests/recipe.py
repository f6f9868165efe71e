"""Modules and batches of the recipes, as the commands build them."""

from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import Tensor

from lightning_dpipe.cli.parts import build_data, build_module
from lightning_dpipe.cli.paths import config_dir
from lightning_dpipe.models.spec import DRAW_KEY


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose("config", list(overrides))


def built(recipe: str, *overrides: str, jitter: float = 0.0) -> Any:
    """The module of a recipe; `jitter` moves weights off zero, which would hide what is wrong."""
    torch.manual_seed(0)
    module = build_module(composed(f"recipe={recipe}", *overrides))
    module.configure_model()
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(jitter * torch.randn_like(weight))
    return module


def batch_of(recipe: str, count: int, *overrides: str, batch: int = 0) -> dict[str, Tensor]:
    """The first validation samples, with the draw keys of training batch `batch`."""
    data = build_data(composed(f"recipe={recipe}", f"data.batch_size={count}", *overrides))
    fields: dict[str, Tensor] = next(iter(data.val_dataloader()))
    return {**fields, DRAW_KEY: torch.tensor([[batch, slot] for slot in range(count)])}

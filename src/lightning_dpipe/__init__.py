"""Planned pipeline training of diffusion models in PyTorch Lightning.

Importing this package registers ``Trainer(strategy="diffusionpipe")`` and loads neither torch nor
Lightning; the names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_dpipe.registration import register
from lightning_dpipe.version import __version__

if TYPE_CHECKING:
    from lightning_dpipe.models.spec import (
        Backbone,
        Field,
        FrozenComponent,
        Layer,
        Loss,
        PipelineSpec,
        SelfConditioning,
    )
    from lightning_dpipe.strategy.callbacks.bubble_fill import BubbleFill
    from lightning_dpipe.strategy.module import DiffusionModule
    from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy

__all__ = [
    "Backbone",
    "BubbleFill",
    "DiffusionModule",
    "DiffusionPipeStrategy",
    "Field",
    "FrozenComponent",
    "Layer",
    "Loss",
    "PipelineSpec",
    "SelfConditioning",
    "__version__",
]

_HOMES = {
    "Backbone": "models.spec",
    "BubbleFill": "strategy.callbacks.bubble_fill",
    "DiffusionModule": "strategy.module",
    "DiffusionPipeStrategy": "strategy.strategy",
    "Field": "models.spec",
    "FrozenComponent": "models.spec",
    "Layer": "models.spec",
    "Loss": "models.spec",
    "PipelineSpec": "models.spec",
    "SelfConditioning": "models.spec",
}

register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What a model does itself and its layer list does not: hooks, checkpointing. Refuse it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_dpipe.core.errors import UnsupportedError


def refuse_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Refuse forward and backward hooks on `modules`, given by the name that errors use.

    Raises:
        UnsupportedError: One has a hook.
    """
    for name, module in modules.items():
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if any(hooks):
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) has hooks, which would never run because its "
                "layers are called one by one; put them on the inner modules, or remove them"
            )


def refuse_checkpointing(model: Any) -> None:
    """Refuse a diffusers model that recomputes activations itself.

    Raises:
        UnsupportedError: Its gradient checkpointing is on.
    """
    if model.gradient_checkpointing:
        raise UnsupportedError(
            f"{type(model).__name__} uses gradient checkpointing, which the layer list does not "
            "run; switch it off (the plan's `recompute` does that)"
        )

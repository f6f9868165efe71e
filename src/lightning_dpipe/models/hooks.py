"""Hooks on modules whose own forward a layer list does not call would never run: refuse them."""

from collections.abc import Mapping

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

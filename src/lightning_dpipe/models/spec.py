"""How a user describes a pipeline-able model: layers over named tensors.

Every named tensor is ``[batch, ...]``: its first dimension counts samples. A layer reads tensors by
name and writes tensors by name; later layers see the last one written under a name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError

DRAW_KEY = "draw_key"
"""Batch field that the engine adds: int64 ``[batch, 2]`` = (batches consumed, global slot).

A frozen layer that draws random numbers reads it, so that each sample's draws depend on the sample
and the step only, never on rank, stage or call order.
"""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: ``module(*reads)`` returns one tensor, or a tuple in the order of `writes`.

    `owns` lists the modules whose weights the layer uses, when `module` does not register them as
    its own (an adapter that calls into a larger model); by default `module` itself.
    """

    name: str
    module: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    owns: tuple[nn.Module | nn.Parameter, ...] | None = None

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The layer's own weights, each once, in module order."""
        owners = self.owns
        if owners is None:
            owners = (self.module,) if isinstance(self.module, nn.Module) else ()
        found: dict[int, nn.Parameter] = {}
        for owner in owners:
            for p in (owner,) if isinstance(owner, nn.Parameter) else owner.parameters():
                found.setdefault(id(p), p)
        return tuple(found.values())

    def modules(self) -> tuple[nn.Module, ...]:
        """All submodules the layer runs."""
        owners = self.owns
        if owners is None:
            owners = (self.module,) if isinstance(self.module, nn.Module) else ()
        return tuple(m for o in owners if isinstance(o, nn.Module) for m in o.modules())


@dataclass(frozen=True, kw_only=True)
class FrozenComponent:
    """A chain of layers without gradient, in eval mode for ever; its work runs ahead.

    Components form a DAG by the names they read and write. A component may have no weights (noise,
    timesteps, caption dropout): it then exists so that work that depends on it can run ahead too.
    """

    name: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A trained chain of layers; frozen layers inside it pass gradients through."""

    name: str
    layers: tuple[Layer, ...]


Component = FrozenComponent | Backbone


@dataclass(frozen=True, kw_only=True)
class Loss:
    """``fn(*reads)`` returns one value per sample, shape ``[batch]``.

    The engine takes the exact mean over the global batch, however the batch is cut.
    """

    fn: Callable[..., Tensor]
    reads: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SelfConditioning:
    """Analog Bits (arXiv 2208.04202): with `probability`, condition on a first estimate.

    ``estimate(*reads)`` runs on the last stage without gradient and returns the tensor that the
    backbone reads as `writes`; otherwise that tensor is zeros. One coin per global batch.
    """

    writes: str
    estimate: Callable[..., Tensor]
    reads: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise SpecError(
                f"self-conditioning probability is {self.probability}; expected a value in [0, 1]"
            )


@dataclass(frozen=True, kw_only=True)
class Field:
    """A batch field: shape of one sample (no batch dimension) and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """A model as the engine sees it. `inputs` declares the batch's fields, so no data is needed.

    `loss` is one Loss, or one per backbone by name when there are several.
    """

    inputs: Mapping[str, Field]
    backbones: tuple[Backbone, ...]
    loss: Loss | Mapping[str, Loss]
    frozen: tuple[FrozenComponent, ...] = field(default=())
    self_conditioning: SelfConditioning | None = None

    def losses(self) -> dict[str, Loss]:
        """Loss by backbone name.

        Raises:
            SpecError: A backbone has no loss, or a loss names no backbone.
        """
        names = [b.name for b in self.backbones]
        if isinstance(self.loss, Loss):
            if len(names) != 1:
                raise SpecError(
                    f"one loss for {len(names)} backbones ({', '.join(names)}); "
                    "give a mapping from backbone name to Loss"
                )
            return {names[0]: self.loss}
        if set(self.loss) != set(names):
            raise SpecError(
                f"losses are given for {sorted(self.loss)}, backbones are {sorted(names)}; "
                "give exactly one loss per backbone"
            )
        return dict(self.loss)

    @property
    def components(self) -> tuple[Component, ...]:
        """Frozen components, then backbones, as the spec lists them."""
        return (*self.frozen, *self.backbones)

    def component(self, name: str) -> Component:
        """Find a component by name.

        Raises:
            SpecError: There is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise SpecError(f"no component {name!r} in the spec")

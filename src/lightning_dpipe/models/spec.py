"""How a user describes a pipeline-able model: layers over named tensors.

Every named tensor is ``[batch, ...]``: its first dimension counts samples. A layer reads tensors by
name and writes tensors by name; later layers see the last one written under a name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.buckets import BASE
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
    """A trained chain of layers; frozen layers inside it pass gradients through.

    `model` is the library's model that the layers were cut from, for those who run it in another
    way than layer by layer (sampling by rows); None: not known.
    """

    name: str
    layers: tuple[Layer, ...]
    model: nn.Module | None = field(default=None, compare=False)


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

    `loss` is one Loss, or one per backbone by name when there are several. `shapes` declares more
    shape classes (aspect-ratio buckets) beside `inputs`, which is class "base": by class name the
    per-sample shapes of the fields that differ, and of what self-conditioning writes.
    """

    inputs: Mapping[str, Field]
    backbones: tuple[Backbone, ...]
    loss: Loss | Mapping[str, Loss]
    frozen: tuple[FrozenComponent, ...] = field(default=())
    self_conditioning: SelfConditioning | None = None
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sc = self.self_conditioning
        known = set(self.inputs) | ({sc.writes} if sc is not None else set())
        seen: dict[tuple[tuple[int, ...], ...], str] = {}
        for name in self.buckets:
            unknown = sorted(set(self.shapes.get(name, ())) - known)
            if unknown:
                raise SpecError(
                    f"shape class {name!r} declares a shape of {unknown[0]!r}; shapes can be given "
                    f"for: {', '.join(sorted(known))}"
                )
            shapes = tuple(f.shape for f in self.in_bucket(name).inputs.values())
            if shapes in seen:
                raise SpecError(
                    f"shape classes {seen[shapes]!r} and {name!r} give every batch field the same "
                    f"shape, so no batch could tell which one it is; leave one out"
                )
            seen[shapes] = name

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of all shape classes, the base first.

        Raises:
            SpecError: A declared class has the base's name.
        """
        if BASE in self.shapes:
            raise SpecError(f"shape class {BASE!r} is what `inputs` declares; rename yours")
        return (BASE, *self.shapes)

    def in_bucket(self, name: str) -> "PipelineSpec":
        """The same model with one class's shapes as its only ones.

        Raises:
            SpecError: No such class is declared.
        """
        if name not in self.buckets:
            raise SpecError(f"no shape class {name!r}; declared are {', '.join(self.buckets)}")
        if not self.shapes:
            return self
        given = self.shapes.get(name, {})
        inputs = {n: replace(f, shape=tuple(given.get(n, f.shape))) for n, f in self.inputs.items()}
        sc = self.self_conditioning
        if sc is not None:
            sc = replace(sc, shape=tuple(given.get(sc.writes, sc.shape)))
        return replace(self, inputs=inputs, self_conditioning=sc, shapes={})

    def bucket_of(self, fields: Mapping[str, Tensor]) -> str:
        """The class of a batch, ``fields[name]`` being ``[batch, ...]``.

        Raises:
            SpecError: No class has these shapes; field, shape and the known classes are named.
        """
        found = {n: tuple(fields[n].shape[1:]) for n in self.inputs if n in fields}
        declared = {
            b: {n: f.shape for n, f in self.in_bucket(b).inputs.items()} for b in self.buckets
        }
        for bucket, shapes in declared.items():
            if all(shapes[name] == shape for name, shape in found.items()):
                return bucket
        alone = [n for n, shape in found.items() if shape not in (s[n] for s in declared.values())]
        names = alone[:1] or sorted(n for n in found if any(n in s for s in self.shapes.values()))
        known = "; ".join(
            f"{bucket}: {', '.join(f'{n} {shapes[n]}' for n in names)}"
            for bucket, shapes in declared.items()
        )
        raise SpecError(
            f"batch field{'s' if len(names) > 1 else ''} with per-sample shape "
            f"{', '.join(f'{n!r} {found[n]}' for n in names)} belong to no shape class of the spec "
            f"({known}); change the data, `PipelineSpec.inputs` or `PipelineSpec.shapes`"
        )

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

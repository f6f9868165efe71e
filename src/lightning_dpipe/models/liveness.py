"""From a model description to its graph: which layer reads and writes which tensor.

In:     a PipelineSpec. Out: a ModelGraph, without data, arithmetic or a change to the model.
Every layer runs once on fake tensors. Two names for one tensor (``h`` just pushed as a skip) are
one value, found by the identity of the tensor that the layer returned: sent twice, it would cost
twice the bytes and another order of gradient sums (not bit-identical to one process).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import DPipeError, SpecError, UnsupportedError
from lightning_dpipe.core.graph import (
    DTYPE_BYTES,
    ComponentGraph,
    ComponentKind,
    FeedbackNode,
    LayerNode,
    LossNode,
    ModelGraph,
    Value,
)
from lightning_dpipe.models.fakerun import FakeRunner, Outcome, device_of
from lightning_dpipe.models.names import (
    BATCH,
    FEEDBACK,
    check_names,
    frozen_order,
    outside_reads,
    reads_from_outside,
    source,
)
from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Backbone,
    Component,
    Field,
    FrozenComponent,
    Layer,
    PipelineSpec,
    SelfConditioning,
)
from lightning_dpipe.models.weights import check_weights


def trace(
    spec: PipelineSpec,
    *,
    autocast: torch.dtype | None = None,
    batch: int = 2,
    device: torch.device | None = None,
) -> ModelGraph:
    """Run every layer once on fake tensors and record what it reads and writes.

    Args:
        spec: The model. Its weights may be anywhere, also on meta.
        autocast: Mixed-precision dtype the model will run under, None for none.
        batch: Samples of the fake batch. A second run with one more finds tensors whose first
            dimension does not count samples.
        device: Where the model will run (autocast's rules differ between devices); by default
            where its weights are, cpu for meta.

    Raises:
        SpecError: Names, shapes, weights or outputs are inconsistent; the message names them.
        UnsupportedError: A layer cannot be cut into micro-batches (BatchNorm), or a frozen layer
            draws unkeyed random numbers.
    """
    check_names(spec)
    order = frozen_order(spec)
    check_weights(spec)
    layers = [layer for component in spec.components for layer in component.layers]
    weights: list[Tensor] = [p for layer in layers for p in layer.parameters()]
    weights += [b for layer in layers for m in layer.modules() for b in m.buffers(recurse=False)]
    device = device or device_of(weights)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(
            f"cannot trace for {device}: this torch sees no GPU; trace for the cpu, or on a "
            "machine with one"
        )
    runner = FakeRunner(device, autocast, weights)
    _Trace(spec, order, runner, batch + 1).run()
    return _Trace(spec, order, runner, batch).run()


class _Trace:
    """One run over the model at one batch size."""

    def __init__(
        self,
        spec: PipelineSpec,
        order: tuple[FrozenComponent, ...],
        runner: FakeRunner,
        batch: int,
    ) -> None:
        self.spec, self.order, self.runner, self.batch = spec, order, runner, batch
        self.values: list[Value] = []
        self.tensors: list[Tensor] = []
        # Last value of each name, by where it comes from.
        self.finals: dict[str, dict[str, int]] = {}
        fields = dict(spec.inputs)
        if reads_from_outside(spec, DRAW_KEY):
            fields[DRAW_KEY] = Field(shape=(2,), dtype=torch.int64)
        self.finals[BATCH] = {name: self._add_field(name, f) for name, f in fields.items()}
        if spec.self_conditioning is not None:
            sc = spec.self_conditioning
            self.finals[FEEDBACK] = {
                sc.writes: self._add_field(sc.writes, Field(shape=sc.shape, dtype=sc.dtype))
            }

    def run(self) -> ModelGraph:
        components = [self._component(c, ComponentKind.FROZEN) for c in self.order]
        losses, feedback = [], None
        for backbone in self.spec.backbones:
            components.append(self._component(backbone, ComponentKind.BACKBONE))
            losses.append(self._loss(backbone))
        if self.spec.self_conditioning is not None:
            feedback = self._estimate(self.spec.self_conditioning)
        return ModelGraph(
            values=tuple(self.values),
            inputs=tuple(self.finals[BATCH].values()),
            components=tuple(components),
            losses=tuple(losses),
            feedback=feedback,
        )

    def _component(self, component: Component, kind: ComponentKind) -> ComponentGraph:
        own: dict[str, int] = {}
        with _mode(component.layers, training=kind is ComponentKind.BACKBONE):
            nodes = [self._layer(component, layer, own, kind) for layer in component.layers]
        self.finals[component.name] = own
        if kind is ComponentKind.BACKBONE and not any(node.trained for node in nodes):
            raise SpecError(
                f"backbone {component.name!r} has no trained weights; set requires_grad on those "
                "to train, or make it a FrozenComponent"
            )
        return ComponentGraph(name=component.name, kind=kind, layers=tuple(nodes))

    def _layer(
        self, component: Component, layer: Layer, own: dict[str, int], kind: ComponentKind
    ) -> LayerNode:
        where = f"{component.name}.{layer.name}"
        reads = tuple(self._resolve(component, name, own, where) for name in layer.reads)
        training = kind is ComponentKind.BACKBONE
        outcome = self._call(where, layer.module, layer.reads, reads, grad=training)
        if training:
            _check_owned(where, layer, outcome)
        else:
            _refuse_draws(where, outcome)
        outputs = _outputs(where, layer, outcome.outputs)
        writes: list[int] = []
        for name, tensor in zip(layer.writes, outputs, strict=True):
            known = next((v for v in (*reads, *writes) if self.tensors[v] is tensor), None)
            if known is None:
                known = self._add(where, name, tensor)
                writes.append(known)
                # The layer's other outputs are compared with the tensor it returned.
                self.tensors[known] = tensor
            own[name] = known
        for value in writes:
            self.tensors[value] = self.runner.leaf(self.tensors[value])
        trained = training and any(p.requires_grad for p in layer.parameters())
        return LayerNode(
            name=layer.name,
            reads=reads,
            writes=tuple(writes),
            trained=trained,
            passes_grad=trained or any(self.values[v].requires_grad for v in reads),
            random=training and outcome.draws,
        )

    def _loss(self, backbone: Backbone) -> LossNode:
        loss = self.spec.losses()[backbone.name]
        where = f"the loss of {backbone.name}"
        reads = self._resolve_all(backbone, loss.reads, where)
        outcome = self._call(where, loss.fn, loss.reads, reads, grad=True)
        _refuse_draws(where, outcome)
        result = outcome.outputs
        if not isinstance(result, Tensor) or tuple(result.shape) != (self.batch,):
            raise SpecError(
                f"{where} returns {_describe(result)} for {self.batch} samples; expected one value "
                f"per sample, shape [{self.batch}] (mean over the other dimensions)"
            )
        if not result.requires_grad:
            raise SpecError(
                f"{where} depends on no trained weight; read what the backbone writes, undetached"
            )
        if outcome.weights:
            raise SpecError(
                f"{where} uses a trained weight of shape {list(outcome.weights[0].shape)}; move it "
                "into a layer, so that a stage owns it"
            )
        return LossNode(backbone=backbone.name, reads=reads)

    def _estimate(self, sc: SelfConditioning) -> FeedbackNode:
        where = "the self-conditioning estimate"
        value = self.finals[FEEDBACK][sc.writes]
        readers = [
            b for b in self.spec.backbones if any(r.name == sc.writes for r in outside_reads(b))
        ]
        if len(readers) != 1:
            names = ", ".join(b.name for b in readers) or "none"
            raise SpecError(
                f"self-conditioning writes {sc.writes!r}, read by {len(readers)} backbones "
                f"({names}); expected exactly one"
            )
        reads = self._resolve_all(readers[0], sc.reads, where)
        result = self._call(where, sc.estimate, sc.reads, reads, grad=False).outputs
        if (
            not isinstance(result, Tensor)
            or tuple(result.shape) != (self.batch, *sc.shape)
            or result.dtype != sc.dtype
        ):
            raise SpecError(
                f"{where} returns {_describe(result)} for {self.batch} samples; expected "
                f"{sc.dtype} {[self.batch, *sc.shape]} as SelfConditioning declares"
            )
        return FeedbackNode(backbone=readers[0].name, reads=reads, writes=value)

    def _resolve_all(self, backbone: Backbone, names: Sequence[str], where: str) -> tuple[int, ...]:
        own = self.finals[backbone.name]
        return tuple(self._resolve(backbone, name, own, where) for name in names)

    def _resolve(self, component: Component, name: str, own: dict[str, int], where: str) -> int:
        if name in own:
            return own[name]
        return self.finals[source(self.spec, component, name, where=where, own=own)][name]

    def _call(
        self,
        where: str,
        fn: Callable[..., Any],
        names: Sequence[str],
        reads: Sequence[int],
        *,
        grad: bool,
    ) -> Outcome:
        args = [self.tensors[v] for v in reads]
        before = [tensor._version for tensor in args]
        try:
            outcome = self.runner.call(fn, args, grad=grad)
        except DPipeError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{n} {_describe(t)}" for n, t in zip(names, args, strict=True))
            raise SpecError(f"{where} failed on fake tensors ({shapes}): {error}") from error
        for name, tensor, version in zip(names, args, before, strict=True):
            if tensor._version != version:
                raise SpecError(
                    f"{where} changes {name!r} in place, which its other readers would see or not, "
                    "depending on the cut; return a new tensor"
                )
        return outcome

    def _add_field(self, name: str, field: Field) -> int:
        # Draws are made on the host, so their keys stay there.
        host = torch.device("cpu") if name == DRAW_KEY else None
        tensor = self.runner.empty((self.batch, *field.shape), field.dtype, host)
        return self._add(f"field {name!r}", name, tensor)

    def _add(self, where: str, name: str, tensor: Tensor) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise SpecError(f"{where} writes {name!r} as {dtype}; known: {', '.join(DTYPE_BYTES)}")
        if tensor.dim() == 0 or tensor.shape[0] != self.batch:
            raise SpecError(
                f"{where} writes {name!r} with shape {list(tensor.shape)} for {self.batch} "
                "samples; the first dimension must count samples (expand a constant, or keep it "
                "in a buffer)"
            )
        self.values.append(
            Value(
                name=name,
                shape=tuple(tensor.shape[1:]),
                dtype=dtype,
                requires_grad=tensor.requires_grad,
            )
        )
        self.tensors.append(tensor)
        return len(self.values) - 1


def _outputs(where: str, layer: Layer, result: Any) -> tuple[Tensor, ...]:
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    for output in outputs:
        if not isinstance(output, Tensor):
            raise SpecError(
                f"{where} returns a {type(output).__name__}; return a tensor, or a tuple of "
                f"tensors for {', '.join(layer.writes)}"
            )
    if len(outputs) != len(layer.writes):
        raise SpecError(
            f"{where} returns {len(outputs)} tensors but writes {len(layer.writes)} names "
            f"({', '.join(layer.writes)})"
        )
    return outputs


def _check_owned(where: str, layer: Layer, outcome: Outcome) -> None:
    owned = {id(p) for p in layer.parameters()}
    for weight in outcome.weights:
        if id(weight) not in owned:
            raise SpecError(
                f"{where} uses a trained weight of shape {list(weight.shape)} that it does not "
                "own; list its module in `owns`"
            )


def _refuse_draws(where: str, outcome: Outcome) -> None:
    if outcome.draws:
        raise UnsupportedError(
            f"{where} draws from torch's global generator, so its numbers would depend on rank "
            f"and call order; read {DRAW_KEY!r} and draw from it, or pass a generator"
        )


def _describe(result: Any) -> str:
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__}"
    return f"{result.dtype} {list(result.shape)}"


@contextmanager
def _mode(layers: Sequence[Layer], *, training: bool) -> Iterator[None]:
    """Train or eval mode for the modules of `layers`, put back on exit."""
    modules: dict[nn.Module, bool] = {m: m.training for layer in layers for m in layer.modules()}
    try:
        for module in modules:
            module.training = training
        yield
    finally:
        for module, was in modules.items():
            module.training = was

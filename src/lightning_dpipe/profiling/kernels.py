"""What kernels a model launches: FLOPs and bytes of each, without data, arithmetic or a device.

In:     a Binding (weights anywhere, also on meta) and its graph. Out: per layer the kernels of
        forward, backward and input gradient at any batch size.
Every layer runs on fake tensors at two batch sizes. A kernel's work is a fixed part and a part per
sample, so the two sizes give all others. Of layers that do the same one runs (`likeness`).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.graph import ComponentGraph, ComponentKind, ModelGraph
from lightning_dpipe.models.fakerun import FakeRunner, device_of
from lightning_dpipe.profiling.likeness import likeness
from lightning_dpipe.profiling.saved import SavedBytes
from lightning_dpipe.runtime.bound import Binding, BoundLayer
from lightning_dpipe.runtime.transport import torch_dtype

_SIZES = (2, 3)
_aten = torch.ops.aten
# Kernels that read only as much of their first operand as they write.
_GATHERS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
# Backward as twice the forward: what a fused kernel computes again is not counted.
_ATTENTION: Mapping[Any, tuple[int, int]] = {  # op -> (first of q, k, v; times the forward)
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 1),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 2),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: FLOPs (2 per multiply-add), bytes read and written, dtype of the operands."""

    name: str
    flops: int
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Kernels of one layer at one batch size; `activation_bytes` is kept for the backward.

    `backward` has what autograd needs: no weight gradients for frozen weights, nothing at all for a
    layer no gradient passes. `input_grad` is its part without any weight gradient.
    """

    name: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_grad: tuple[Kernel, ...]
    activation_bytes: int


class Work:
    """The work of all layers at any batch size."""

    def __init__(
        self,
        low: Mapping[str, tuple[LayerWork, ...]],
        high: Mapping[str, tuple[LayerWork, ...]],
    ) -> None:
        self._low, self._high = low, high

    def at(self, component: str, samples: int) -> tuple[LayerWork, ...]:
        """Work of a component's layers on `samples` samples.

        Raises:
            ProfileError: A layer launches other kernels for another batch size.
        """
        pairs = zip(self._low[component], self._high[component], strict=True)
        return tuple(_line(component, low, high, samples) for low, high in pairs)

    def flops(self, component: str, samples: int = 1) -> tuple[int, int]:
        """FLOPs of a component's (forward, backward)."""
        layers = self.at(component, samples)
        return (
            sum(k.flops for layer in layers for k in layer.forward),
            sum(k.flops for layer in layers for k in layer.backward),
        )


def count_work(binding: Binding, graph: ModelGraph, *, autocast: torch.dtype | None = None) -> Work:
    """Count every kernel of a model; a backbone's last layer includes its loss.

    Args:
        binding: The model's callables; nothing about them is changed.
        graph: Their graph, traced under the same `autocast`.
        autocast: Mixed-precision dtype the model will run under, None for none.
    """
    layers = [layer for chain in binding.layers.values() for layer in chain]
    weights: list[Tensor] = [p for layer in layers for p in layer.parameters]
    weights += [b for layer in layers for m in layer.modules for b in m.buffers(recurse=False)]
    runner = FakeRunner(device_of(weights), autocast, weights)
    low, high = (_Count(binding, graph, runner, n).run() for n in _SIZES)
    return Work(low, high)


class _Count:
    """One run over the model at one batch size."""

    def __init__(
        self, binding: Binding, graph: ModelGraph, runner: FakeRunner, num_samples: int
    ) -> None:
        self.binding, self.graph, self.runner = binding, graph, runner
        self.twins: dict[Hashable, _Counted] = {}
        fields = [*graph.inputs, *([graph.feedback.writes] if graph.feedback else [])]
        self.values: dict[int, Tensor] = {}
        for v in fields:
            host = torch.device("cpu") if v == binding.draw_key else None
            value = graph.values[v]
            self.values[v] = runner.empty(
                (num_samples, *value.shape), torch_dtype(value.dtype), host
            )

    def run(self) -> dict[str, tuple[LayerWork, ...]]:
        return {c.name: self._component(c) for c in self.graph.components}

    def _component(self, component: ComponentGraph) -> tuple[LayerWork, ...]:
        trains = component.kind is ComponentKind.BACKBONE
        layers = self.binding.layers[component.name]
        own = {v for node in component.layers for v in node.writes}
        saved = SavedBytes()
        work = []
        for index, layer in enumerate(layers):
            loss = self.binding.losses.get(component.name) if index == len(layers) - 1 else None
            reads = tuple(dict.fromkeys(layer.reads + (loss.reads if loss else ())))
            written = {v for _, v in layer.writes}
            reads = tuple(v for v in reads if v not in written)

            def forward(
                *args: Tensor,
                layer: BoundLayer = layer,
                reads: tuple[int, ...] = reads,
                loss: Any = loss,
            ) -> tuple[Tensor, ...]:
                values = dict(zip(reads, args, strict=True))
                made = layer.run(values)
                values |= made
                ends = (loss.fn(*[values[v] for v in loss.reads]),) if loss else ()
                return (*(made[v] for _, v in layer.writes), *ends)

            chain = saved if trains else None
            key = None if loss else self._key(layer, reads, own, chain)
            found = self.twins.get(key) or self._layer(layer, reads, forward, own, chain, loss)
            if found.alone and key is not None:
                self.twins[key] = found
            work.append(self._add(found, layer, reads, chain))
        return tuple(work)

    def _key(
        self, layer: BoundLayer, reads: tuple[int, ...], own: set[int], saved: SavedBytes | None
    ) -> Hashable:
        """What a layer's work depends on: its code, and what it reads of whom."""
        storages = [self.values[v].untyped_storage()._cdata for v in reads]
        given = [
            (likeness(self.values[v]), storages.index(at), v in own, bool(saved and saved.kept(v)))
            for v, at in zip(reads, storages, strict=True)
        ]
        places = tuple(reads.index(v) for v in layer.reads)
        written = tuple(position for position, _ in layer.writes)
        code = likeness((layer.fn, layer.parameters, layer.modules))
        return (code, places, written, tuple(given), saved is not None)

    def _add(
        self, found: "_Counted", layer: BoundLayer, reads: tuple[int, ...], saved: SavedBytes | None
    ) -> LayerWork:
        """Let later layers see what this one made and keeps; its own work, or that of its twin."""
        values = [v for _, v in layer.writes]
        made = self.runner.like(found.made) if found.alone else found.made
        self.values.update(zip(values, made, strict=True))
        if saved is not None:
            around = zip((*reads, *values), found.kept, strict=True)
            saved.keep(v for v, kept in around if kept)
        return replace(found.work, name=layer.name)

    def _layer(
        self,
        layer: BoundLayer,
        reads: tuple[int, ...],
        forward: Callable[..., tuple[Tensor, ...]],
        own: set[int],
        saved: SavedBytes | None,
        loss: Any,
    ) -> "_Counted":
        args = [self.runner.leaf(self.values[v]) for v in reads]
        watch = _KernelWatch()
        if saved is None:
            outputs = self.runner.call(forward, args, grad=False, watch=watch).outputs
        else:
            weights = [*layer.parameters, *(b for m in layer.modules for b in m.buffers(False))]
            with saved.counting([self.runner.stand_in(w) for w in weights]):
                outputs = self.runner.call(forward, args, grad=True, watch=watch).outputs
        made = dict(zip((v for _, v in layer.writes), outputs, strict=False))
        kept = 0
        if saved is not None:
            around = {**dict(zip(reads, args, strict=True)), **made}
            kept = saved.total(around, [v for v in reads if v not in own])
        ends = outputs[-1:] if loss else outputs
        backward, input_grad = self._gradients(ends, args) if saved is not None else ((), ())
        work = LayerWork(
            name=layer.name,
            forward=watch.kernels(),
            backward=backward,
            input_grad=input_grad,
            activation_bytes=kept,
        )
        return _Counted(
            work=work,
            made=tuple(map(self.runner.leaf, made.values())),
            kept=tuple(saved is not None and saved.kept(v) for v in (*reads, *made)),
            alone=_own_memory(made.values(), args),
        )

    def _gradients(
        self, ends: Sequence[Tensor], args: Sequence[Tensor]
    ) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
        """Kernels of the whole backward, and of its part towards the inputs."""
        inputs = [t for t in args if t.requires_grad]
        watch = _KernelWatch()
        leaves = self.runner.backward(ends, None, watch=watch)
        weights = [t for t in leaves if not any(t is x for x in inputs)]
        # Each micro-batch but the first adds to the gradients that are there.
        sums = [Kernel("accumulate", 0, 3 * w.nbytes, _name(w.dtype)) for w in weights]
        whole = (*watch.kernels(), *sums)
        if not weights:
            return whole, whole
        part = _KernelWatch()
        if inputs:
            self.runner.backward(ends, inputs, watch=part)
        return whole, part.kernels()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """A layer's work, what it made, and which of what it read and made has been kept by then.

    `alone`: what it made shares no memory with what it read, so that its like can be made.
    """

    work: LayerWork
    made: tuple[Tensor, ...]
    kept: tuple[bool, ...]
    alone: bool


def _own_memory(made: Iterable[Tensor], args: Iterable[Tensor]) -> bool:
    """Whether no tensor of `made` is a part of an argument, or seen there as another dtype."""
    dtypes: dict[int, torch.dtype | None] = {t.untyped_storage()._cdata: None for t in args}
    return all(dtypes.setdefault(t.untyped_storage()._cdata, t.dtype) is t.dtype for t in made)


class _KernelWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every op that computes or moves data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels: list[Kernel] = []

    def kernels(self) -> tuple[Kernel, ...]:
        """What was seen so far."""
        return tuple(self._kernels)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if written and not _moves_nothing(func):
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self._kernels.append(_kernel(func, args, kwargs, out, read, written))
        return out


def _moves_nothing(func: Any) -> bool:
    """Views and allocations: no kernel."""
    name = func._schema.name.split("::")[-1]
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return views or "empty" in name or name in ("_unsafe_view", "detach", "lift_fresh")


def _kernel(
    func: Any, args: Any, kwargs: Any, out: Any, read: list[Tensor], written: list[Tensor]
) -> Kernel:
    packet = func._overloadpacket
    if packet in _ATTENTION:
        first, times = _ATTENTION[packet]
        shapes = [t.shape for t in args[first : first + 3]]
        flops = times * sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    else:
        flops = 0
    num_bytes = sum(map(_bytes, written))
    num_bytes += num_bytes if packet in _GATHERS else sum(map(_bytes, read))
    floats = [t.dtype for t in (*read, *written) if t.dtype.is_floating_point]
    return Kernel(str(packet), flops, num_bytes, _name(floats[0] if floats else written[0].dtype))


def _bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor; what is expanded is read once."""
    numel = math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s or n == 1)
    return numel * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(component: str, low: LayerWork, high: LayerWork, samples: int) -> LayerWork:
    where = f"{component}.{low.name}"

    def kernels(a: tuple[Kernel, ...], b: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        if [k.name for k in a] != [k.name for k in b]:
            raise ProfileError(
                f"{where} launches {len(a)} kernels for {_SIZES[0]} samples and {len(b)}, or other "
                f"ones, for {_SIZES[1]}; its cost cannot be estimated, measure it (dpipe profile)"
            )
        return tuple(
            Kernel(
                x.name,
                _extrapolate(x.flops, y.flops, samples),
                _extrapolate(x.num_bytes, y.num_bytes, samples),
                x.dtype,
            )
            for x, y in zip(a, b, strict=True)
        )

    return LayerWork(
        name=low.name,
        forward=kernels(low.forward, high.forward),
        backward=kernels(low.backward, high.backward),
        input_grad=kernels(low.input_grad, high.input_grad),
        activation_bytes=_extrapolate(low.activation_bytes, high.activation_bytes, samples),
    )


def _extrapolate(low: int, high: int, samples: int) -> int:
    per_sample = (high - low) // (_SIZES[1] - _SIZES[0])
    return max(0, low + per_sample * (samples - _SIZES[0]))

"""Measure every layer of a model, forward and backward, at each local batch size.

In:     a ModelGraph, its Binding with weights on the device, and the sizes by component.
Out:    one ComponentCost per component. Weights, gradients, modes and random state are as before.
A component's layers are run in order, each timed by itself, and the whole pass is repeated: caches
are as cold as in training, and a disturbance hits one repeat of many layers, which medians drop,
rather than all repeats of one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.graph import ComponentGraph, ComponentKind, ModelGraph
from lightning_dpipe.core.profile import ComponentCost, LayerCost
from lightning_dpipe.profiling.clock import Clock, Repeats, clock_for, median_us
from lightning_dpipe.profiling.inputs import MeasuringInputs
from lightning_dpipe.profiling.optimizer import OptimizerCost, measure_optimizer
from lightning_dpipe.profiling.saved import SavedBytes
from lightning_dpipe.profiling.standins import standing_in
from lightning_dpipe.runtime.bound import Binding, BoundLayer, BoundLoss

Progress = Callable[[str], None]
"""Called with one line of text before each part of the work."""


def measure_layers(
    binding: Binding,
    graph: ModelGraph,
    *,
    samples: Mapping[str, Sequence[int]],
    device: torch.device,
    autocast: torch.dtype | None = None,
    repeats: Repeats | None = None,
    budget_s: float | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> tuple[ComponentCost, ...]:
    """Measure all components of a model.

    The times of a backbone's last layer include its loss.

    Args:
        binding: The model's callables; weights must be on `device`, or on meta: then made-up ones
            stand in, one layer at a time.
        graph: Their graph.
        samples: Component name -> local batch sizes to measure at.
        device: Where to measure.
        autocast: Mixed-precision dtype the model will run under, None for none.
        repeats: How often; by default two warm-up passes and five measured ones.
        budget_s: When this is used up, what is left is measured with a single warm pass.
        clock: By default the device's own.
        progress: Told what comes next.

    Raises:
        ProfileError: A component has no sizes, or weights are elsewhere.
    """
    _check(binding, graph, samples, device)
    clock = clock or clock_for(device)
    tell = progress or (lambda text: None)
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    costs = []
    layers = [layer for chain in binding.layers.values() for layer in chain]
    with _untouched(layers, device):
        tell("optimizer step")
        optimizer = measure_optimizer(clock, device)
        _set_modes(graph, binding)
        fewest = min(n for c in graph.components for n in samples[c.name])
        with _autocast(device, autocast):
            inputs = MeasuringInputs(graph, binding, device, fewest)
        for component in graph.components:
            runs = []
            for size in sorted(set(samples[component.name])):
                tell(f"{component.name} at {size} samples")
                late = deadline_s is not None and time.monotonic() > deadline_s
                run = _ComponentRun(component, graph, binding, clock, device)
                with _autocast(device, autocast):
                    run.measure(inputs, size, Repeats(warmup=1, repeats=1) if late else repeats)
                runs.append(run)
            costs.append(_cost(component, binding.layers[component.name], runs, optimizer))
    return tuple(costs)


class _Pass(Enum):
    """What one pass over a component measures after each forward."""

    WARM = "warm"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"


@dataclass(slots=True)
class _Times:
    """Measured times of one layer at one size, one entry a pass."""

    forward_us: list[float] = field(default_factory=list)
    backward_us: list[float] = field(default_factory=list)
    input_grad_us: list[float] = field(default_factory=list)
    activation_bytes: int = 0


class _ComponentRun:
    """Measures one component at one size."""

    def __init__(
        self,
        component: ComponentGraph,
        graph: ModelGraph,
        binding: Binding,
        clock: Clock,
        device: torch.device,
    ) -> None:
        self.device = device
        self.trains = component.kind is ComponentKind.BACKBONE
        self.layers = binding.layers[component.name]
        self.loss: BoundLoss | None = binding.losses.get(component.name)
        self.clock = clock
        self.size = 0
        self.times = [_Times() for _ in self.layers]
        written = {v for layer in component.layers for v in layer.writes}
        reads = [set(layer.reads) for layer in component.layers]
        if self.loss is not None:
            reads[-1] |= set(self.loss.reads)
        self.reads = [
            tuple(sorted(r - set(x.writes))) for r, x in zip(reads, component.layers, strict=True)
        ]
        self.outside = frozenset(set().union(*reads) - written)
        self.leaves = {v for v in written if self.trains and graph.values[v].requires_grad}
        self._saved: SavedBytes | None = None

    def measure(self, inputs: MeasuringInputs, size: int, repeats: Repeats | None) -> None:
        """Warm up, then measure as often as the length of a pass suggests."""
        repeats = repeats or Repeats()
        self.size = size
        values = inputs.at(self.outside, size)
        self._saved = SavedBytes() if self.trains else None
        once_us = self._run(values, _Pass.WARM)
        self._saved = None
        if once_us < repeats.total_us / 3:
            for _ in range(repeats.warmup - 1):
                once_us = self._run(values, _Pass.WARM)
        count = repeats.count(once_us)
        for _ in range(count):
            self._run(values, _Pass.BACKWARD)
        if self.trains:
            for _ in range(-(-count // 2)):
                self._run(values, _Pass.INPUT_GRAD)

    def _run(self, outside: Mapping[int, Tensor], kind: _Pass) -> float:
        """One pass; returns the device time of everything it measured."""
        values = dict(outside)
        last_read = {v: i for i, reads in enumerate(self.reads) for v in reads}
        total_us = 0.0
        for index, layer in enumerate(self.layers):
            reads = {
                v: values[v].detach().requires_grad_() if v in self.leaves else values[v]
                for v in self.reads[index]
            }
            with standing_in(layer.parameters, self.device) as made_up:
                if made_up and torch.is_autocast_enabled(self.device.type):
                    # In training a weight is cast once a step, not in every micro-batch.
                    with torch.set_grad_enabled(self.trains):
                        layer.run(reads)
                outputs, us = self._layer(index, layer, reads, kind)
            total_us += us
            values.update(outputs)
            for value in [v for v in values if last_read.get(v, -1) <= index]:
                del values[value]
        return total_us

    def _layer(
        self, index: int, layer: BoundLayer, reads: dict[int, Tensor], kind: _Pass
    ) -> tuple[dict[int, Tensor], float]:
        """Forward of one layer, then what the pass is about; its outputs without their graph."""
        loss = self.loss if index == len(self.layers) - 1 else None
        times = self.times[index]

        def forward() -> tuple[dict[int, Tensor], list[Tensor]]:
            outputs = layer.run(reads)
            if loss is None:
                return outputs, list(outputs.values())
            everything = {**reads, **outputs}
            return outputs, [loss.fn(*[everything[v] for v in loss.reads])]

        counting = self._saved.counting(_tensors(layer)) if self._saved else nullcontext()
        with torch.set_grad_enabled(self.trains), counting:
            (outputs, ends), forward_us = self.clock.measure(forward)
        if self._saved is not None:
            outside = [v for v in self.reads[index] if v in self.outside]
            times.activation_bytes = self._saved.total({**reads, **outputs}, outside)
        roots = [end for end in ends if end.requires_grad]
        leaves = [tensor for v, tensor in reads.items() if tensor.requires_grad]
        after_us = self._backward(layer, roots, leaves, kind, times) if roots else 0.0
        if kind is _Pass.BACKWARD:
            times.forward_us.append(forward_us)
        return {v: tensor.detach() for v, tensor in outputs.items()}, forward_us + after_us

    def _backward(
        self,
        layer: BoundLayer,
        roots: list[Tensor],
        leaves: list[Tensor],
        kind: _Pass,
        times: _Times,
    ) -> float:
        seeds = [torch.ones_like(root) for root in roots]
        if kind is _Pass.INPUT_GRAD:
            if not leaves:
                return 0.0
            _, us = self.clock.measure(
                lambda: torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
            )
            times.input_grad_us.append(us)
            return us
        trained = [p for p in layer.parameters if p.requires_grad]
        for p in trained:  # in training gradients exist already from the micro-batch before
            p.grad = torch.zeros_like(p)
        _, us = self.clock.measure(lambda: torch.autograd.backward(roots, seeds))
        for p in trained:
            p.grad = None
        if kind is _Pass.BACKWARD:
            times.backward_us.append(us)
        return us


def _cost(
    component: ComponentGraph,
    layers: Sequence[BoundLayer],
    runs: Sequence[_ComponentRun],
    optimizer: OptimizerCost,
) -> ComponentCost:
    return ComponentCost(
        name=component.name,
        samples=tuple(run.size for run in runs),
        layers=tuple(
            _layer_cost(layer, [run.times[i] for run in runs], runs[0].trains, optimizer)
            for i, layer in enumerate(layers)
        ),
    )


def _layer_cost(
    layer: BoundLayer, sizes: Sequence[_Times], trains: bool, optimizer: OptimizerCost
) -> LayerCost:
    trained = [p for p in layer.parameters if trains and p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    backward = [median_us(t.backward_us) for t in sizes]
    # Without trained weights the input gradient is all there is; it is never more than the whole.
    part = [median_us(t.input_grad_us) for t in sizes] if trained else backward
    return LayerCost(
        name=layer.name,
        forward_us=tuple(median_us(t.forward_us) for t in sizes),
        backward_us=tuple(backward),
        input_grad_us=tuple(min(i, b) for i, b in zip(part, backward, strict=True)),
        activation_bytes=tuple(t.activation_bytes for t in sizes),
        param_bytes=sum(p.numel() * p.element_size() for p in layer.parameters),
        trained_bytes=trained_bytes,
        optimizer_us=optimizer.step_us(len(trained), trained_bytes),
    )


def _check(
    binding: Binding,
    graph: ModelGraph,
    samples: Mapping[str, Sequence[int]],
    device: torch.device,
) -> None:
    for component in graph.components:
        sizes = samples.get(component.name, ())
        if not sizes or min(sizes) < 1:
            raise ProfileError(
                f"component {component.name!r} has sizes {list(sizes)}; "
                "give at least one batch size >= 1"
            )
        for layer in binding.layers[component.name]:
            for p in layer.parameters:
                if p.device.type not in (device.type, "meta"):
                    raise ProfileError(
                        f"a weight of {component.name}.{layer.name} is on {p.device}, the profile "
                        f"is of {device}; move the model there before profiling it"
                    )


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _tensors(layer: BoundLayer) -> Iterator[Tensor]:
    yield from layer.parameters
    for module in layer.modules:
        yield from module.buffers(recurse=False)


def _set_modes(graph: ModelGraph, binding: Binding) -> None:
    """Frozen components in eval, backbones in train mode, as in training."""
    for component in graph.components:
        for layer in binding.layers[component.name]:
            for module in layer.modules:
                module.training = component.kind is ComponentKind.BACKBONE


@contextmanager
def _untouched(layers: Sequence[BoundLayer], device: torch.device) -> Iterator[None]:
    """Put modes, gradients and torch's random state back afterwards."""
    modules = {id(m): m for layer in layers for m in layer.modules}
    parameters: dict[int, nn.Parameter] = {id(p): p for x in layers for p in x.parameters}
    modes = {key: module.training for key, module in modules.items()}
    grads = {key: p.grad for key, p in parameters.items()}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for key, module in modules.items():
                module.training = modes[key]
            for key, p in parameters.items():
                p.grad = grads[key]

"""Sane inputs for measuring: batch fields made up by dtype, everything else computed from them.

In:     graph and binding. Out: any value at any number of samples.
Layers are fed what the layers before them wrote, so value ranges are those of the real model at a
few made-up samples, repeated to the size wanted.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dpipe.core.graph import ComponentKind, ModelGraph, Value
from lightning_dpipe.profiling.standins import standing_in
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.runtime.transport import torch_dtype


class MeasuringInputs:
    """Values that components read from outside, made once at `num_samples` samples."""

    def __init__(
        self, graph: ModelGraph, binding: Binding, device: torch.device, num_samples: int
    ) -> None:
        self._device = device
        generator = torch.Generator().manual_seed(0)
        fields = set(graph.inputs) | ({graph.feedback.writes} if graph.feedback else set())
        self._values: dict[int, Tensor] = {
            v: made_up(graph.values[v], num_samples, generator).to(device) for v in sorted(fields)
        }
        losses = {v for loss in graph.losses for v in loss.reads}
        for index, component in enumerate(graph.components):
            later = {v for c in graph.components[index + 1 :] for x in c.layers for v in x.reads}
            if component.kind is ComponentKind.FROZEN:  # a backbone's own loss is measured with it
                later |= losses
            wanted = later & {v for layer in component.layers for v in layer.writes}
            if wanted:
                self._run(binding, component.name, wanted)

    def _run(self, binding: Binding, component: str, wanted: set[int]) -> None:
        values = dict(self._values)
        with torch.no_grad():
            for layer in binding.layers[component]:
                with standing_in(layer.parameters, self._device):
                    values.update(layer.run(values))
        self._values.update((v, values[v]) for v in wanted)

    def at(self, values: Iterable[int], num_samples: int) -> dict[int, Tensor]:
        """The given outside values, ``[num_samples, ...]`` each."""
        return {v: _repeat(self._values[v], num_samples) for v in values}


def made_up(value: Value, num_samples: int, generator: torch.Generator) -> Tensor:
    """A batch field: normal floats, ones for masks and booleans, zeros for other integers."""
    shape, dtype = (num_samples, *value.shape), torch_dtype(value.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    one = dtype is torch.bool or "mask" in value.name
    return torch.full(shape, int(one), dtype=dtype)


def _repeat(tensor: Tensor, num_samples: int) -> Tensor:
    if tensor.shape[0] == num_samples:
        return tensor
    rows = torch.arange(num_samples, device=tensor.device) % tensor.shape[0]
    return tensor[rows]

"""What starting one piece of frozen work costs beside its layers.

In:     a ModelGraph, its Binding and the device. Out: microseconds.
The engine's own `FrozenRunner` and `Encodings` run every frozen layer on one sample of two, as a
fill does, but with callables that return finished outputs at once. What is left is Python, and the
copy that keeps the row; the layers' own launches are in the layers' times.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.program import Encode, When
from lightning_dpipe.profiling.clock import Clock, clock_for, median_us
from lightning_dpipe.runtime.bound import Binding, BoundLayer
from lightning_dpipe.runtime.encodings import Encodings
from lightning_dpipe.runtime.frozen import FrozenRunner
from lightning_dpipe.runtime.transport import torch_dtype

_REPEATS = 5


def measure_fill_us(
    binding: Binding, graph: ModelGraph, *, device: torch.device, clock: Clock | None = None
) -> int:
    """Median time of a fill of one layer, the layer's own work apart; 0 without frozen layers.

    Args:
        binding: Its layers say which outputs are values; they are not run.
        graph: Shapes and dtypes of the values.
        device: Where the rows are kept.
        clock: By default the device's own.
    """
    clock = clock or clock_for(device)
    times_us: list[float] = []
    for component in graph.frozen:
        for i, layer in enumerate(component.layers):
            chain = list(binding.layers[component.name])
            chain[i] = _finished(chain[i], graph, device)
            runner = FrozenRunner(graph, {**binding.layers, component.name: chain})
            work = Encode(
                component=component.name, start=i, stop=i + 1, first=0, last=1, when=When.NEXT
            )
            bank = Encodings(graph, 0, device)  # one a layer: its buffers go with it
            for repeat in range(_REPEATS + 1):
                bank.begin({}, (2,))
                for value in layer.reads:
                    bank.landing(value, 0, 0, 2)
                _, spent_us = clock.measure(_running(runner, work, bank))
                if repeat:  # the first one makes the buffers
                    times_us.append(spent_us)
    return median_us(times_us)


def _running(runner: FrozenRunner, work: Encode, bank: Encodings) -> Callable[[], None]:
    return lambda: runner.run(work, bank)


def _finished(layer: BoundLayer, graph: ModelGraph, device: torch.device) -> BoundLayer:
    """A layer that returns outputs of one sample at once, whatever it is given."""
    outputs: list[Tensor | None] = [None] * (1 + max((at for at, _ in layer.writes), default=0))
    for at, value in layer.writes:
        known = graph.values[value]
        shape, dtype = (1, *known.shape), torch_dtype(known.dtype)
        outputs[at] = torch.zeros(shape, dtype=dtype, device=device)
    ready = tuple(outputs)
    return BoundLayer(
        name=layer.name,
        fn=lambda *_: ready,
        reads=layer.reads,
        writes=layer.writes,
        parameters=(),
        modules=(),
        random=False,
    )

"""The set-up cost of a fill is measured on the path that fills take."""

from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.profiling.fills import measure_fill_us
from lightning_dpipe.runtime.encodings import Encodings
from small import random_model, small_unet

T = TypeVar("T")


class Sevens:
    """A clock that runs the work and reads 7, 9, 11, ... microseconds."""

    def __init__(self) -> None:
        self.num_measured = 0

    def measure(self, work: Callable[[], T]) -> tuple[T, float]:
        self.num_measured += 1
        return work(), 5.0 + 2 * self.num_measured


def test_every_frozen_layer_runs_as_a_fill_and_the_first_run_of_each_is_dropped() -> None:
    spec = small_unet(2)
    graph = trace(spec)
    clock = Sevens()
    found = measure_fill_us(bind(spec, graph), graph, device=torch.device("cpu"), clock=clock)
    layers = sum(len(c.layers) for c in graph.frozen)
    assert clock.num_measured == 6 * layers
    kept = sorted(7 + 2 * i for i in range(6 * layers) if i % 6)
    assert found == -(-(kept[len(kept) // 2 - 1] + kept[len(kept) // 2]) // 2)


def test_it_goes_through_the_runner_s_own_bookkeeping(monkeypatch) -> None:
    spec = random_model(3)
    graph = trace(spec)
    written: list[int] = []
    write = Encodings.write

    def noted(self, value, device, first, last, tensor) -> None:
        written.append(value)
        write(self, value, device, first, last, tensor)

    monkeypatch.setattr(Encodings, "write", noted)
    found = measure_fill_us(bind(spec, graph), graph, device=torch.device("cpu"))
    assert set(written) == {v for c in graph.frozen for x in c.layers for v in x.writes}
    assert found >= 1, "Python and a copy take some time"


def test_the_layers_themselves_are_not_run() -> None:
    spec = small_unet(2)
    graph = trace(spec)
    binding = bind(spec, graph)
    calls: list[str] = []
    for layer in (x for c in graph.frozen for x in binding.layers[c.name]):
        for module in layer.modules:
            module.register_forward_hook(lambda *_: calls.append("ran"))
    measure_fill_us(binding, graph, device=torch.device("cpu"))
    assert not calls


def test_a_model_without_frozen_layers_has_no_fills() -> None:
    from lightning_dpipe.core.graph import ModelGraph

    spec = small_unet(2)
    graph = trace(spec)
    read = tuple(sorted({*graph.inputs, *graph.side_inputs}))
    bare = ModelGraph(
        values=graph.values, inputs=read, components=graph.backbones, losses=graph.losses
    )
    assert measure_fill_us(bind(spec, graph), bare, device=torch.device("cpu")) == 0

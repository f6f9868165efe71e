"""Frozen work: run some layers of a frozen component on some samples of a local batch.

Frozen weights do not change, so the work may run a step ahead, cut by layer and by sample.
Encoders run under `no_grad`, not inference mode: their output takes part in training.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.program import Encode
from lightning_dpipe.runtime.bound import BoundLayer
from lightning_dpipe.runtime.encodings import Encodings


class Keeper(Protocol):
    """Is shown values of interest as they are read or written, to keep them for later epochs."""

    @property
    def watched(self) -> frozenset[int]:
        """The values to show."""

    def see(
        self, value: int, bank: Encodings, owner: int, first: int, tensor: torch.Tensor
    ) -> None:
        """Rows from `first` of a value, of the local batch of device `owner`, `[rows, ...]`."""


class FrozenRunner:
    """Runs Encode instructions against a bank of encodings. `keeper` looks on."""

    keeper: Keeper | None = None

    def __init__(self, graph: ModelGraph, components: Mapping[str, Sequence[BoundLayer]]) -> None:
        self._layers = {c.name: tuple(components[c.name]) for c in graph.frozen}
        self._readers: dict[int, int] = {}
        for component in graph.frozen:
            for layer in component.layers:
                for value in layer.reads:
                    self._readers[value] = self._readers.get(value, 0) + 1
        self._lasting = frozenset(graph.side_inputs) | frozenset(graph.inputs)
        self._kept: dict[tuple[str, int, int], frozenset[int]] = {}
        self._graph = graph

    def run(self, work: Encode, bank: Encodings) -> None:
        """Run some layers on some rows; keep what something later reads."""
        layers = self._layers[work.component][work.start : work.stop]
        kept = self._kept_of(work)
        rows = work.last - work.first
        home = bank.position if work.owner is None else work.owner
        total = bank.sizes[home] if work.rows is None else work.rows
        env: dict[int, torch.Tensor] = {}
        keeper = self.keeper
        watched = frozenset[int]() if keeper is None else keeper.watched
        with torch.no_grad():
            for layer in layers:
                inputs = [
                    env[v] if v in env else bank.read(v, home, work.first, work.last)
                    for v in layer.reads
                ]
                for value, tensor in zip(layer.reads, inputs, strict=True):
                    if keeper is not None and value in watched and value not in env:
                        keeper.see(value, bank, home, work.first, tensor)
                outputs = layer.fn(*inputs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                for position, value in layer.writes:
                    # Between two fills a value lies in rows, contiguous. Kernels give other last
                    # bits for other strides: with one layout, cutting a chain changes no bit.
                    env[value] = outputs[position].contiguous()
                    if keeper is not None and value in watched:
                        keeper.see(value, bank, home, work.first, env[value])
                    if value in kept:
                        bank.write(value, home, work.first, work.last, env[value])
                for value in layer.reads:
                    if value not in self._lasting:
                        bank.consume(value, home, rows, total * self._readers[value])

    def _kept_of(self, work: Encode) -> frozenset[int]:
        """Values written by these layers that something outside them reads."""
        key = (work.component, work.start, work.stop)
        if key not in self._kept:
            inside = {(work.component, i) for i in range(work.start, work.stop)}
            outside = {
                value
                for component in self._graph.frozen
                for i, layer in enumerate(component.layers)
                if (component.name, i) not in inside
                for value in layer.reads
            }
            self._kept[key] = frozenset(outside | set(self._graph.side_inputs))
        return self._kept[key]

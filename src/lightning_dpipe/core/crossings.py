"""What crosses stage borders, worked out once for planning, simulation and lowering alike.

A graph-state value goes directly from the stage that wrote it to each stage that reads it. Its
gradient returns along the readers in reverse stage order and from the first reader to the writer:
each reader adds its own share before passing it on, which is the order in which one process sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Graph-state `value`, written by stage `writer`, read by the later stages `readers`."""

    value: int
    writer: int
    readers: tuple[int, ...]

    @property
    def gradient_hops(self) -> tuple[tuple[int, int], ...]:
        """(from stage, to stage) of the returning gradient, in the order of travel."""
        path = (self.writer, *self.readers)
        return tuple((path[i], path[i - 1]) for i in range(len(path) - 1, 0, -1))


def stage_of_layer(stages: Sequence[Stage], backbone: str, layer: int) -> int:
    """Index of the stage that holds a layer.

    Raises:
        PlanError: No stage does.
    """
    for index, stage in enumerate(stages):
        if stage.backbone == backbone and stage.start <= layer < stage.stop:
            return index
    raise PlanError(f"layer {layer} of {backbone!r} is in no stage of the plan; plan again")


def loss_stage(graph: ModelGraph, stages: Sequence[Stage], backbone: str) -> int:
    """The stage that computes the backbone's loss: the one with its last layer."""
    return stage_of_layer(stages, backbone, len(graph.component(backbone).layers) - 1)


def stage_reads(graph: ModelGraph, stages: Sequence[Stage], index: int) -> tuple[int, ...]:
    """All values that a stage reads and did not write itself, in first-use order.

    The stage with the last layer also reads what the loss and the self-conditioning estimate read.
    """
    stage = stages[index]
    layers = graph.component(stage.backbone).layers[stage.start : stage.stop]
    wanted = [v for layer in layers for v in layer.reads]
    if loss_stage(graph, stages, stage.backbone) == index:
        wanted += [
            v for loss in graph.losses if loss.backbone == stage.backbone for v in loss.reads
        ]
        if graph.feedback is not None and graph.feedback.backbone == stage.backbone:
            wanted += graph.feedback.reads
    written = {v for layer in layers for v in layer.writes}
    return tuple(dict.fromkeys(v for v in wanted if v not in written))


def crossings(graph: ModelGraph, stages: Sequence[Stage]) -> tuple[Crossing, ...]:
    """Every graph-state value that leaves the stage it was written in, by (writer, value)."""
    readers: dict[int, list[int]] = {}
    for index in range(len(stages)):
        for value in stage_reads(graph, stages, index):
            if value in graph.graph_state:
                readers.setdefault(value, []).append(index)
    found = [
        Crossing(
            value=value,
            writer=stage_of_layer(stages, *graph.writers[value]),
            readers=tuple(sorted(at, key=lambda i: stages[i].start)),
        )
        for value, at in readers.items()
    ]
    return tuple(sorted(found, key=lambda c: (c.writer, c.value)))

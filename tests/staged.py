"""A pipeline in one process without a pipeline: cut, detach at every border, chain the gradients.

It knows `core.crossings` and nothing of programs, messages or the engine, so it shows that cutting
the layer list and returning gradients along the readers gives one process's sums, bit for bit.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_dpipe.core.crossings import crossings, stage_reads
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Stage
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Backbone, Field, Loss, PipelineSpec
from lightning_dpipe.runtime.bound import Binding


def stages_at(backbone: str, num_layers: int, cuts: Sequence[int]) -> tuple[Stage, ...]:
    borders = (0, *cuts, num_layers)
    return tuple(
        Stage(backbone=backbone, start=start, stop=stop, devices=(i,))
        for i, (start, stop) in enumerate(itertools.pairwise(borders))
    )


def spec_of(backbone: Backbone, inputs: Mapping[str, Tensor]) -> PipelineSpec:
    """A spec whose loss is ``sum(out * cotangent)``: any output gradient can be asked for."""
    return PipelineSpec(
        inputs={n: Field(shape=tuple(t.shape[1:]), dtype=t.dtype) for n, t in inputs.items()},
        backbones=(backbone,),
        loss=Loss(
            fn=lambda out, cotangent: (out * cotangent).flatten(1).sum(1),
            reads=("out", "cotangent"),
        ),
    )


def bound(backbone: Backbone, inputs: Mapping[str, Tensor]) -> tuple[Binding, ModelGraph]:
    spec = spec_of(backbone, inputs)
    graph = trace(spec)
    return bind(spec, graph), graph


def run_staged(
    binding: Binding, graph: ModelGraph, cuts: Sequence[int], fields: Mapping[str, Tensor]
) -> Tensor:
    """Forward and backward of the only backbone, cut before layers `cuts`; returns the losses.

    Gradients accumulate in the weights' ``grad``.
    """
    (backbone,) = graph.backbones
    stages = stages_at(backbone.name, len(backbone.layers), cuts)
    outside = {v: fields[name] for name, v in binding.inputs.items()}
    written: dict[int, Tensor] = {}
    leaves: list[dict[int, Tensor]] = []
    for index, stage in enumerate(stages):
        leaves.append({})
        values = dict(outside)
        for value in stage_reads(graph, stages, index):
            if value in written:
                leaf = written[value].detach()
                leaf.requires_grad_(graph.values[value].requires_grad)
                leaves[index][value] = values[value] = leaf
        for layer in binding.layers[backbone.name][stage.start : stage.stop]:
            made = layer.run(values)
            written |= made
            values |= made
    loss = binding.losses[backbone.name]
    losses = loss.fn(*[values[v] for v in loss.reads])
    _backward(graph, stages, written, leaves, losses)
    return losses.detach()


def _backward(
    graph: ModelGraph,
    stages: Sequence[Stage],
    written: Mapping[int, Tensor],
    leaves: Sequence[Mapping[int, Tensor]],
    losses: Tensor,
) -> None:
    hops = {c.value: dict(c.gradient_hops) for c in crossings(graph, stages)}
    arrived: dict[tuple[int, int], Tensor] = {}
    for index in reversed(range(len(stages))):
        roots: list[Tensor] = []
        grads: list[Tensor] = []
        if index == len(stages) - 1:
            roots.append(losses)
            grads.append(torch.ones_like(losses))
        for value in hops:
            if (index, value) in arrived:
                roots.append(leaves[index].get(value, written[value]))
                grads.append(arrived[index, value])
        torch.autograd.backward(roots, grads)
        for value, leaf in leaves[index].items():
            if leaf.grad is not None:
                arrived[hops[value][index], value] = leaf.grad

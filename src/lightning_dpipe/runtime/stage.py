"""One stage on one micro-batch: forward over named values, backward over what comes in.

Bit-identity with one process rests on two rules. Every value that arrives is one leaf, however many
layers read it; and a gradient that comes in for a value is given to autograd as a root, together
with the stage's own outputs, so that sums are taken in the order of the uncut graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dpipe.core.crossings import crossings, loss_stage
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Stage
from lightning_dpipe.runtime.bound import Binding, BoundFeedback, BoundLayer, BoundLoss
from lightning_dpipe.runtime.rng import forked


@dataclass(slots=True)
class Saved:
    """What a forward leaves for its backward: leaves that arrived, outputs that left, the loss."""

    leaves: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawContext:
    """Keys of the random draws inside trained layers: the rows of a batch, never the device."""

    seed: int
    batch_index: int
    group: int
    first_row: int


class StageRunner:
    """The layers of one stage, ready to run."""

    def __init__(
        self,
        graph: ModelGraph,
        stages: Sequence[Stage],
        index: int,
        binding: Binding,
        device: torch.device,
    ) -> None:
        stage = stages[index]
        self.layers: tuple[BoundLayer, ...] = tuple(
            binding.layers[stage.backbone][stage.start : stage.stop]
        )
        self._first_key = stage.start + _layers_before(graph, stage.backbone)
        self.device = device
        self.graph_state = graph.graph_state
        self.needs_grad = frozenset(i for i, v in enumerate(graph.values) if v.requires_grad)
        is_last = loss_stage(graph, stages, stage.backbone) == index
        self.loss: BoundLoss | None = binding.losses[stage.backbone] if is_last else None
        node = graph.feedback
        own = node is not None and node.backbone == stage.backbone and is_last
        self.feedback: BoundFeedback | None = binding.feedback if own else None
        leaving = {c.value for c in crossings(graph, stages) if c.writer == index}
        self._drops = _last_uses(self.layers, leaving, self.loss, self.feedback)

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Trained weights of the stage, in layer order, each once."""
        found = {id(p): p for layer in self.layers for p in layer.parameters if p.requires_grad}
        return tuple(found.values())

    def forward(
        self, inputs: Mapping[int, Tensor], saved: Saved, draws: DrawContext | None
    ) -> dict[int, Tensor]:
        """Run the layers with gradients. `draws` None: evaluation mode, nothing is drawn.

        Args:
            inputs: Values that the stage reads, ``[rows, ...]``; graph state becomes leaves.
            saved: Filled with the leaves.
            draws: Keys of dropout.

        Returns:
            Every value still wanted: what leaves the stage, and what loss and estimate read.
        """
        env = dict(inputs)
        for value, tensor in inputs.items():
            if value in self.graph_state and value in self.needs_grad:
                env[value] = saved.leaves[value] = tensor.detach().requires_grad_()
        return self.run(env, draws)

    def run(self, env: dict[int, Tensor], draws: DrawContext | None) -> dict[int, Tensor]:
        """Run the layers over `env`, dropping each value after its last use."""
        for index, (layer, drops) in enumerate(zip(self.layers, self._drops, strict=True)):
            inputs = [env[v] for v in layer.reads]
            if layer.random and draws is not None:
                key = (draws.seed, draws.batch_index, self._first_key + index)
                with forked(self.device, *key, draws.group, draws.first_row):
                    outputs = layer.fn(*inputs)
            else:
                outputs = layer.fn(*inputs)
            if not isinstance(outputs, tuple):
                outputs = (outputs,)
            for position, value in layer.writes:
                env[value] = outputs[position]
            for value in drops:
                env.pop(value, None)
        return env

    def backward(
        self,
        saved: Saved,
        grads: Mapping[int, Tensor],
        loss_scale: Tensor | None,
        returns: Sequence[int],
    ) -> list[Tensor]:
        """Back-propagate; parameter gradients accumulate in place.

        Args:
            saved: What the forward left.
            grads: Gradient that came in, by value (an output of the stage, or an input that a later
                stage reads too).
            loss_scale: ``[rows]`` gradient of the total loss with respect to the per-sample loss.
            returns: Values whose gradient is sent on.

        Returns:
            Gradients of `returns`; zeros where nothing depended on the value.
        """
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for value, grad in grads.items():
            tensor = saved.roots[value] if value in saved.roots else saved.leaves[value]
            if tensor.requires_grad:
                roots.append(tensor)
                seeds.append(grad)
        if saved.loss is not None and loss_scale is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            seeds.append(loss_scale)
        if roots:
            torch.autograd.backward(roots, seeds)
        out = []
        for value in returns:
            leaf = saved.leaves[value]
            out.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        return out


def _layers_before(graph: ModelGraph, backbone: str) -> int:
    """Layers of the backbones in front of one, so that no two draw dropout alike."""
    names = [c.name for c in graph.backbones]
    return sum(len(c.layers) for c in graph.backbones[: names.index(backbone)])


def _last_uses(
    layers: Sequence[BoundLayer],
    leaving: set[int],
    loss: BoundLoss | None,
    feedback: BoundFeedback | None,
) -> tuple[tuple[int, ...], ...]:
    """For each layer, the values that nothing reads after it."""
    wanted = set(leaving)
    wanted |= set(loss.reads) if loss else set()
    wanted |= set(feedback.reads) if feedback else set()
    drops: list[tuple[int, ...]] = []
    for layer in reversed(layers):
        touched = {*layer.reads, *(value for _, value in layer.writes)}
        drops.append(tuple(sorted(touched - wanted)))
        wanted |= touched
    return tuple(reversed(drops))

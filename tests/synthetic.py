"""Synthetic models for tests: a backbone chain, skips, a DAG of frozen chains, exact costs.

Everything is small integers that a reader can add up by hand. Times are per sample, so a layer's
cost at n samples is ``fixed_us + n * per_sample``: partial batches are exactly linear unless
`fixed_us` makes small batches inefficient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_dpipe.core.graph import (
    ComponentGraph,
    ComponentKind,
    FeedbackNode,
    LayerNode,
    LossNode,
    ModelGraph,
    Value,
)
from lightning_dpipe.core.profile import ComponentCost, LayerCost, Link, Profile

SAMPLES = (1, 2, 4, 8, 16, 32, 64)
FREE = Link(latency_us=0, bytes_per_s=10**15)
"""A message of a few kilobytes takes 1 us (`transfer_us` rounds up), one of ``width=0`` none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenChain:
    """A frozen component: `forward_us` per sample and layer; reads the outputs of `after`.

    `fixed_us` is added to every call. Without `after` the first layer reads the batch field `x`.
    """

    name: str
    forward_us: tuple[int, ...]
    after: tuple[str, ...] = ()
    fixed_us: int = 0


def model_graph(
    num_layers: int,
    *,
    skips: Sequence[tuple[int, int]] = (),
    frozen: Sequence[FrozenChain] = (),
    feedback: bool = False,
    width: int = 8,
) -> ModelGraph:
    """Chain ``x -> layer 0 -> ... -> loss`` whose every layer also reads each frozen output.

    ``(a, b)`` in `skips`: layer b reads what layer a wrote. With `feedback` layer 0 reads an
    estimate made from the last layer's output. All values are float32 ``[batch, width]``.
    """
    values = [Value(name="x", shape=(width,), dtype="float32", requires_grad=False)]

    def new(name: str, requires_grad: bool) -> int:
        values.append(
            Value(name=name, shape=(width,), dtype="float32", requires_grad=requires_grad)
        )
        return len(values) - 1

    components, outputs = [], {}
    for chain in frozen:
        layers, reads = [], tuple(outputs[name] for name in chain.after) or (0,)
        for i in range(len(chain.forward_us)):
            written = new(f"{chain.name}.{i}", False)
            layers.append(_node(f"{chain.name}.{i}", reads, written, trained=False))
            reads = (written,)
        outputs[chain.name] = reads[0]
        components.append(
            ComponentGraph(name=chain.name, kind=ComponentKind.FROZEN, layers=tuple(layers))
        )
    side = tuple(outputs.values())
    estimate = new("estimate", False) if feedback else None
    h: list[int] = []
    layers = []
    for i in range(num_layers):
        reads = (h[-1] if h else 0, *side, *(h[a] for a, b in skips if b == i))
        if i == 0 and estimate is not None:
            reads = (*reads, estimate)
        h.append(new(f"h{i}", True))
        layers.append(_node(f"layer{i}", reads, h[-1], trained=True))
    components.append(ComponentGraph(name="net", kind=ComponentKind.BACKBONE, layers=tuple(layers)))
    return ModelGraph(
        values=tuple(values),
        inputs=(0,),
        components=tuple(components),
        losses=(LossNode(backbone="net", reads=(h[-1], 0)),),
        feedback=None
        if estimate is None
        else FeedbackNode(backbone="net", reads=(h[-1],), writes=estimate),
    )


def model_profile(
    forward_us: Sequence[int],
    backward_us: Sequence[int] | None = None,
    *,
    skips: Sequence[tuple[int, int]] = (),
    frozen: Sequence[FrozenChain] = (),
    feedback: bool = False,
    width: int = 8,
    trained_bytes: int = 4096,
    optimizer_us: int = 0,
    p2p: Link = FREE,
    allreduce: Link = FREE,
    overhead_us: int = 0,
    fill_us: int = 0,
) -> Profile:
    """Profile of `model_graph`; backbone times are per sample, backward is 2 x forward by default.

    The input-gradient part is half of the backward.
    """
    backward = [2 * t for t in forward_us] if backward_us is None else list(backward_us)
    graph = model_graph(len(forward_us), skips=skips, frozen=frozen, feedback=feedback, width=width)
    costs = [
        ComponentCost(
            name=chain.name,
            samples=SAMPLES,
            layers=tuple(
                _cost(f"{chain.name}.{i}", f, 0, fixed_us=chain.fixed_us, width=width)
                for i, f in enumerate(chain.forward_us)
            ),
        )
        for chain in frozen
    ]
    costs.append(
        ComponentCost(
            name="net",
            samples=SAMPLES,
            layers=tuple(
                _cost(f"layer{i}", f, b, width=width, weights=trained_bytes, step_us=optimizer_us)
                for i, (f, b) in enumerate(zip(forward_us, backward, strict=True))
            ),
        )
    )
    return Profile(
        graph=graph,
        costs=tuple(costs),
        p2p=p2p,
        allreduce=allreduce,
        device="synthetic",
        dtype="float32",
        overhead_us=overhead_us,
        fill_us=fill_us,
    )


def pair_profile(*parts: Profile) -> Profile:
    """One model with the backbones of several, ``net0``, ``net1``, ..., on one batch field `x`.

    Frozen components keep their names, so only one part may have a component of a name.
    """
    values = list(parts[0].graph.values[:1])
    components, costs, losses, feedback = [], [], [], None
    for i, part in enumerate(parts):
        graph, shift = part.graph, len(values) - 1
        values += graph.values[1:]

        def moved(reads: Sequence[int], shift: int = shift) -> tuple[int, ...]:
            return tuple(v + shift if v else 0 for v in reads)

        for component in graph.components:
            name = f"net{i}" if component.name == "net" else component.name
            layers = tuple(
                replace(x, reads=moved(x.reads), writes=moved(x.writes)) for x in component.layers
            )
            components.append(replace(component, name=name, layers=layers))
            costs.append(replace(part.component(component.name), name=name))
        losses += [LossNode(backbone=f"net{i}", reads=moved(x.reads)) for x in graph.losses]
        node = graph.feedback
        if node is not None:
            writes = node.writes + shift
            feedback = FeedbackNode(backbone=f"net{i}", reads=moved(node.reads), writes=writes)
    components.sort(key=lambda c: c.kind is ComponentKind.BACKBONE)
    graph = ModelGraph(
        values=tuple(values),
        inputs=(0,),
        components=tuple(components),
        losses=tuple(losses),
        feedback=feedback,
    )
    return replace(parts[0], graph=graph, costs=tuple(costs))


def _node(name: str, reads: tuple[int, ...], writes: int, *, trained: bool) -> LayerNode:
    return LayerNode(name=name, reads=reads, writes=(writes,), trained=trained, passes_grad=trained)


def _cost(
    name: str,
    forward_us: int,
    backward_us: int,
    *,
    width: int,
    fixed_us: int = 0,
    weights: int = 0,
    step_us: int = 0,
) -> LayerCost:
    return LayerCost(
        name=name,
        forward_us=tuple(fixed_us + forward_us * n for n in SAMPLES),
        backward_us=tuple(backward_us * n for n in SAMPLES),
        input_grad_us=tuple(backward_us * n // 2 for n in SAMPLES),
        activation_bytes=tuple(4 * width * n for n in SAMPLES),
        param_bytes=weights,
        trained_bytes=weights,
        optimizer_us=step_us,
    )

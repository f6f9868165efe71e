"""Joins a model's callables with its graph: the Binding that the runtime executes."""

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.core.graph import LayerNode, ModelGraph
from lightning_dpipe.models.spec import DRAW_KEY, Layer, PipelineSpec
from lightning_dpipe.models.weights import freeze
from lightning_dpipe.runtime.bound import Binding, BoundFeedback, BoundLayer, BoundLoss


def bind(spec: PipelineSpec, graph: ModelGraph) -> Binding:
    """Bind `spec` to the `graph` that `trace` made of it.

    Frozen components become what they are on the way: in eval mode, without weights that require
    a gradient.

    Raises:
        SpecError: The graph is of another model.
    """
    freeze(spec)
    layers: dict[str, tuple[BoundLayer, ...]] = {}
    for component in graph.components:
        given = spec.component(component.name).layers
        if [x.name for x in given] != [x.name for x in component.layers]:
            raise SpecError(
                f"component {component.name!r} has {len(given)} layers in the spec and "
                f"{len(component.layers)} in the graph, or other names; trace this spec again"
            )
        layers[component.name] = tuple(
            _bind_layer(graph, layer, node)
            for layer, node in zip(given, component.layers, strict=True)
        )
    losses = spec.losses()
    inputs = {graph.values[v].name: v for v in graph.inputs}
    return Binding(
        layers=layers,
        losses={
            node.backbone: BoundLoss(fn=losses[node.backbone].fn, reads=node.reads)
            for node in graph.losses
        },
        feedback=_bind_feedback(spec, graph),
        inputs=inputs,
        draw_key=inputs.get(DRAW_KEY),
    )


def _bind_layer(graph: ModelGraph, layer: Layer, node: LayerNode) -> BoundLayer:
    # A value has the first name it was written under, and a layer writes each name once.
    return BoundLayer(
        name=layer.name,
        fn=layer.module,
        reads=node.reads,
        writes=tuple((layer.writes.index(graph.values[v].name), v) for v in node.writes),
        parameters=layer.parameters(),
        modules=layer.modules(),
        random=node.random,
    )


def _bind_feedback(spec: PipelineSpec, graph: ModelGraph) -> BoundFeedback | None:
    if graph.feedback is None or spec.self_conditioning is None:
        return None
    return BoundFeedback(
        backbone=graph.feedback.backbone,
        fn=spec.self_conditioning.estimate,
        reads=graph.feedback.reads,
        writes=graph.feedback.writes,
    )

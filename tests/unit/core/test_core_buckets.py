"""Shape classes: alike but for shapes, one class a step, and what a mixed step works on."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.buckets import BASE, agreed_bucket, check_alike, pair_graph
from lightning_dpipe.core.errors import DataError, SpecError
from lightning_dpipe.core.graph import ModelGraph
from synthetic import FrozenChain, model_graph

CHAIN = (FrozenChain(name="text", forward_us=(1, 1)),)


def graph_of(width: int, **options) -> ModelGraph:
    return model_graph(3, frozen=CHAIN, width=width, **options)


def test_other_shapes_are_alike() -> None:
    check_alike(graph_of(8), graph_of(12), "wide")


def changed(graph: ModelGraph, what: str) -> ModelGraph:
    value, component = graph.values[-1], graph.components[-1]
    if what == "dtype":
        return replace(graph, values=(*graph.values[:-1], replace(value, dtype="float16")))
    if what == "values":
        return replace(graph, values=(*graph.values, value))
    if what == "reads":
        last = component.layers[-1]
        last = replace(last, reads=(*last.reads, 0))
        component = replace(component, layers=(*component.layers[:-1], last))
        return replace(graph, components=(*graph.components[:-1], component))
    return replace(graph, losses=(replace(graph.losses[0], reads=(0,)),))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "changes value 'h2'"),
        ("values", "changes the number of values: 7 instead of 6 in 'base'"),
        ("reads", r"what layer net\.layer2 reads, writes or trains"),
        ("loss", "inputs, loss or estimate"),
    ],
)
def test_a_class_that_changes_more_than_shapes_is_refused_by_name(what: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"shape class 'wide'.*{message}"):
        check_alike(graph_of(8), changed(graph_of(12), what), "wide")


def test_a_mixed_step_has_this_class_in_the_backbone_and_the_next_ones_encodings() -> None:
    this, following = graph_of(8, feedback=True), graph_of(12, feedback=True)
    mixed = pair_graph(this, following)
    widths = {v.name: v.shape[0] for v in mixed.values}
    assert widths == {
        "x": 12, "text.0": 12, "text.1": 12, "estimate": 8, "h0": 8, "h1": 8, "h2": 8
    }  # fmt: skip
    assert pair_graph(this, this) == this


def test_ranks_of_one_class_agree_and_others_are_named() -> None:
    names = (BASE, "wide", "tall")
    assert agreed_bucket(names, {0: "wide", 1: "wide"}) == "wide"
    with pytest.raises(DataError, match=r"'base' on ranks \[1\], 'tall' on ranks \[0, 2\]"):
        agreed_bucket(names, {0: "tall", 1: BASE, 2: "tall"})

"""A graph whose layers read what is not there cannot be made."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.core.graph import LossNode, Value
from synthetic import FrozenChain, model_graph

GRAPH = model_graph(2, frozen=(FrozenChain(name="text", forward_us=(1,)),), feedback=True)


def with_layer(**changes: object) -> None:
    *before, net = GRAPH.components
    layers = (replace(net.layers[0], **changes), *net.layers[1:])
    replace(GRAPH, components=(*before, replace(net, layers=layers)))


def test_a_layer_reads_only_what_is_made_before_it() -> None:
    own = GRAPH.component("net").layers[0].writes[0]
    for value in (own, 99, -1):
        with pytest.raises(SpecError, match=rf"'layer0' of 'net' reads value {value}, which"):
            with_layer(reads=(value,))


def test_a_value_is_made_once_and_is_listed() -> None:
    for value in (0, 99, -1):  # 0 is the batch field
        with pytest.raises(SpecError, match=rf"'layer0' of 'net' makes value {value}; .* once"):
            with_layer(writes=(value,))
    with pytest.raises(SpecError, match="the batch makes value 0"):
        replace(GRAPH, inputs=(0, 0))


def test_losses_are_of_a_backbone_and_components_have_names_of_their_own() -> None:
    with pytest.raises(SpecError, match="of 'text'; the backbones are net"):
        replace(GRAPH, losses=(LossNode(backbone="text", reads=(0,)),))
    with pytest.raises(SpecError, match="text, net, net: two have one name"):
        replace(GRAPH, components=(*GRAPH.components, GRAPH.components[-1]))


def test_a_value_has_a_known_dtype_and_extents() -> None:
    for dtype, shape in (("float31", (2,)), ("float32", (-1,))):
        with pytest.raises(SpecError, match=f"value 'h' is {dtype}"):
            Value(name="h", shape=shape, dtype=dtype, requires_grad=False)

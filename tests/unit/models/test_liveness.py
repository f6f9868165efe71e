"""Tracing finds one value per tensor, whatever its names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.core.graph import ComponentKind
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.objective.draws import normal
from reference import run_once
from unit.models.chain import WIDTH, Fork, Sum, conditioned, encoder, layer, spec


def test_two_names_for_one_tensor_are_one_value() -> None:
    graph = trace(
        spec(
            layer("fork", "x", "h skip", Fork()),
            layer("keep", "h x", "h same", lambda h, x: (h + 1, x)),
            layer("last", "h skip same", "out", lambda h, skip, same: h + skip + same),
        )
    )
    fork, keep, last = graph.backbones[0].layers
    names = [v.name for v in graph.values]
    assert names == ["x", "target", "h", "h", "out"]
    assert fork.writes == (2,)
    assert keep.reads == (2, 0)
    assert keep.writes == (3,)
    assert last.reads == (3, 2, 0)
    assert graph.losses[0].reads == (4, 1)
    assert graph.graph_state == {2, 3, 4}
    assert graph.side_inputs == (0, 1)


def test_shapes_dtypes_and_gradients_are_those_of_a_real_run() -> None:
    def frozen_net() -> nn.Linear:
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    graph = trace(
        spec(
            layer("locked", "x", "a", frozen_net()),
            layer("trained", "a", "b", nn.Linear(WIDTH, WIDTH)),
            layer("through", "b", "c", frozen_net()),
            layer("index", "c", "out i", lambda c: (c, c.argmax(1))),
            frozen=(encoder(layer("e", "x", "unused", nn.Linear(WIDTH, 6))),),
        )
    )
    values = {v.name: v for v in graph.values}
    assert [values[n].requires_grad for n in ("x", "a", "b", "c", "i")] == [
        False, False, True, True, False,
    ]  # fmt: skip
    assert (values["i"].shape, values["i"].dtype) == ((), "int64")
    assert (values["unused"].shape, values["unused"].requires_grad) == ((6,), False)
    flags = [(x.trained, x.passes_grad) for x in graph.backbones[0].layers]
    assert flags == [(False, False), (True, True), (False, True), (False, True)]
    assert not graph.component("enc").layers[0].trained


def test_weights_may_be_on_meta_and_nothing_of_the_model_is_touched() -> None:
    real = spec()
    with torch.device("meta"):
        meta = spec()
    weights = [p for x in meta.backbones[0].layers for p in x.parameters()]
    assert trace(meta) == trace(real)
    assert all(
        a is b for a, b in zip(weights, meta.backbones[0].layers[0].parameters(), strict=False)
    )
    assert all(p.is_meta and p.requires_grad and p.grad is None for p in weights)


def test_meta_weights_beside_real_ones_and_bare_parameters_trace() -> None:
    bare = nn.Parameter(torch.ones(WIDTH, device="meta"))
    table = torch.arange(4.0)
    graph = trace(
        spec(
            layer("bare", "x", "h", lambda x: x * bare + table, owns=(bare,)),
            layer("real", "h", "out"),
        )
    )
    assert all(x.trained for x in graph.backbones[0].layers)


def test_autocast_decides_the_dtype_that_crosses_a_cut() -> None:
    graph = trace(spec(), autocast=torch.bfloat16)
    assert [v.dtype for v in graph.values] == ["float32", "float32", "bfloat16", "bfloat16"]


def test_tracing_for_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="cannot trace for cuda: this torch sees no GPU"):
        trace(spec(), device=torch.device("cuda"))


def test_dropout_is_seen_in_train_mode_and_modes_are_put_back() -> None:
    drop = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
    off = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
    still = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
    drop.eval()
    graph = trace(
        spec(
            layer("drop", "e", "h", drop),
            layer("off", "h", "out", off),
            frozen=(encoder(layer("still", "x", "e", still)),),
        )
    )
    assert [x.random for x in graph.backbones[0].layers] == [True, False]
    assert not graph.frozen[0].layers[0].random
    assert [m.training for m in (drop, drop[1], off, still[1])] == [False, False, True, True]


def test_frozen_components_run_in_the_order_of_what_they_read() -> None:
    late = encoder(layer("l0", "e", "h"), layer("l1", "h", "late"), name="late")
    early = encoder(layer("l0", "x", "h"), layer("l1", "h", "e"), name="early")
    graph = trace(spec(layer("last", "late e", "out", Sum()), frozen=(late, early)))
    assert [c.name for c in graph.components] == ["early", "late", "net"]
    assert [c.kind for c in graph.components] == [ComponentKind.FROZEN] * 2 + [
        ComponentKind.BACKBONE
    ]
    # Each keeps its own `h`.
    assert [v.name for v in graph.values] == ["x", "target", "h", "e", "h", "late", "out"]
    assert graph.side_inputs == (1, 3, 5)


def test_keyed_draws_are_traced_without_drawing() -> None:
    def noise(x: Tensor, key: Tensor) -> Tensor:
        return x + normal(0, "noise", key, (WIDTH,)).to(x.device)

    graph = trace(
        spec(
            layer("net", "noisy", "out"),
            frozen=(encoder(layer("n", f"x {DRAW_KEY}", "noisy", noise)),),
        )
    )
    key = graph.values[graph.inputs[-1]]
    assert (key.name, key.shape, key.dtype) == (DRAW_KEY, (2,), "int64")
    assert len(trace(spec()).inputs) == 2


def test_the_estimate_is_a_value_without_gradient_beside_the_inputs() -> None:
    graph = trace(conditioned())
    assert graph.feedback is not None
    value = graph.feedback.writes
    assert value not in graph.inputs
    assert not graph.values[value].requires_grad
    assert graph.backbones[0].layers[0].reads == (0, value)
    assert [graph.values[v].name for v in graph.feedback.reads] == ["out", "x"]
    assert value not in graph.side_inputs


KINDS: dict[str, Callable[..., Any]] = {
    "new": lambda *xs: sum(xs) + 1,
    "fork": lambda *xs: (lambda h: (h, h))(sum(xs) * 2),
    "keep": lambda *xs: (xs[0] * 3, xs[-1]),
    "pass": lambda *xs: (xs[0], xs[-1]),
}
NAMES = ("x", "a", "b", "c")


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[str, list[str], list[str]]]:
    """Random layers: kind, reads among the names written so far, one or two writes."""
    known, chain = ["x"], []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        count = 1 if kind == "new" else 2
        writes = draw(st.permutations(NAMES[1:]))[:count]
        known += [w for w in writes if w not in known]
        chain.append((kind, reads, list(writes)))
    return chain


@settings(max_examples=40, deadline=None)
@given(chains())
def test_values_are_the_distinct_tensors_of_a_real_run(
    chain: list[tuple[str, list[str], list[str]]],
) -> None:
    layers = [
        layer(f"l{i}", " ".join(reads), " ".join(writes), KINDS[kind])
        for i, (kind, reads, writes) in enumerate(chain)
    ]
    model = spec(*layers, layer("last", chain[-1][2][0], "out"))
    graph = trace(model)
    binding = bind(model, graph)
    fields = {"x": torch.randn(2, WIDTH), "target": torch.randn(2, WIDTH)}
    values = run_once(binding, graph, fields)

    named, distinct = dict(fields), list(fields.values())
    for given_layer, node in zip(model.backbones[0].layers, graph.backbones[0].layers, strict=True):
        read = [named[name] for name in given_layer.reads]
        for tensor, value in zip(read, node.reads, strict=True):
            assert torch.equal(tensor, values[value])
        made = given_layer.module(*read)
        made = made if isinstance(made, tuple) else (made,)
        distinct += [t for t in dict.fromkeys(made) if not any(t is d for d in distinct)]
        named.update(zip(given_layer.writes, made, strict=True))
    assert len(graph.values) == len(distinct)
    assert torch.equal(named["out"], values[graph.losses[0].reads[0]])

"""Layers that advance a counted clock by known amounts must be profiled at exactly those."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.profile import ComponentCost
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import (
    Backbone,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
)
from lightning_dpipe.profiling.clock import Repeats
from lightning_dpipe.profiling.layers import measure_layers

T = TypeVar("T")
CPU = torch.device("cpu")


class CountedClock:
    """Time passes only when a layer says so; every `disturbed`-th measurement is far too long."""

    def __init__(self, disturbed: int = 0) -> None:
        self.now_us = 0.0
        self.num_measured = 0
        self.disturbed = disturbed

    def measure(self, work: Callable[[], T]) -> tuple[T, float]:
        before_us = self.now_us
        result = work()
        self.num_measured += 1
        extra = self.disturbed and self.num_measured % self.disturbed == 0
        return result, self.now_us - before_us + (1e5 if extra else 0)


class Tick(torch.autograd.Function):
    """Identity that costs time per sample, on the way forth and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: CountedClock, f_us: int, b_us: int) -> Tensor:
        ctx.clock, ctx.cost_us = clock, b_us
        clock.now_us += f_us * x.shape[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.now_us += ctx.cost_us * grad.shape[0]
        return grad, None, None, None


class Ticking(nn.Module):
    """`f_us` forward, `i_us` for the input's gradient and `w_us` for the weight's, per sample."""

    def __init__(self, clock: CountedClock, f_us: int, i_us: int = 0, w_us: int = 0) -> None:
        super().__init__()
        self.clock, self.costs_us = clock, (f_us, i_us, w_us)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor) -> Tensor:
        f_us, i_us, w_us = self.costs_us
        weight = Tick.apply(self.weight.expand(h.shape[0], 4), self.clock, 0, w_us)
        return Tick.apply(h, self.clock, f_us, i_us) * weight


def ticking_spec(clock: CountedClock) -> PipelineSpec:
    locked = Ticking(clock, 7, 9, 0).requires_grad_(False)
    layers = [("a", Ticking(clock, 3, 5, 11)), ("locked", locked), ("b", Ticking(clock, 13, 2, 4))]

    def loss(h: Tensor, target: Tensor) -> Tensor:
        return Tick.apply(h - target, clock, 100, 200).square().mean(1)

    return PipelineSpec(
        inputs={"image": Field(shape=(4,)), "tokens": Field(shape=(3,), dtype=torch.int64)},
        frozen=(
            FrozenComponent(
                name="encoder",
                layers=(
                    Layer(name="e", module=Ticking(clock, 17), reads=("image",), writes=("e",)),
                ),
            ),
        ),
        backbones=(
            Backbone(
                name="net",
                layers=tuple(
                    Layer(name=n, module=m, reads=("e" if n == "a" else "h",), writes=("h",))
                    for n, m in layers
                ),
            ),
        ),
        loss=Loss(fn=loss, reads=("h", "e")),
    )


def measured(
    spec: PipelineSpec, clock: CountedClock, samples: dict[str, tuple[int, ...]], **kwargs: Any
) -> dict[str, ComponentCost]:
    graph = trace(spec)
    costs = measure_layers(
        bind(spec, graph), graph, samples=samples, device=CPU, clock=clock, **kwargs
    )
    return {cost.name: cost for cost in costs}


SIZES = {"encoder": (4, 1, 2, 2), "net": (3, 2)}


@pytest.mark.parametrize("disturbed", [0, 7])
def test_times_are_exact_at_every_size_though_single_measurements_are_disturbed(
    disturbed: int,
) -> None:
    clock = CountedClock(disturbed)
    costs = measured(ticking_spec(clock), clock, SIZES)
    encoder, net = costs["encoder"], costs["net"]
    assert encoder.samples == (1, 2, 4)
    assert encoder.layers[0].forward_us == (17, 34, 68)
    assert encoder.layers[0].backward_us == encoder.layers[0].input_grad_us == (0, 0, 0)
    assert encoder.layers[0].trained_bytes == 0
    assert encoder.layers[0].param_bytes == 16
    assert net.samples == (2, 3)
    a, locked, b = net.layers
    assert a.forward_us == (6, 9)
    assert a.backward_us == (22, 33)  # nothing before it wants its input's gradient
    assert a.input_grad_us == (0, 0)
    assert locked.forward_us == (14, 21)
    assert locked.backward_us == locked.input_grad_us == (18, 27)
    assert locked.trained_bytes == 0
    assert b.forward_us == (2 * 113, 3 * 113)  # the loss runs with the last layer
    assert b.backward_us == (2 * 206, 3 * 206)
    assert b.input_grad_us == (2 * 202, 3 * 202)
    assert b.trained_bytes == b.param_bytes == 16


def test_the_model_is_left_as_it_was() -> None:
    clock = CountedClock()
    spec = ticking_spec(clock)
    graph = trace(spec)
    binding = bind(spec, graph)
    net = [layer.module for layer in spec.backbones[0].layers]
    weights = [p for m in net for p in m.parameters()]
    for m in net:
        m.eval()
    weights[0].grad = torch.full((4,), 3.0)
    before = [p.detach().clone() for p in weights]
    state = torch.get_rng_state()
    measure_layers(binding, graph, samples=SIZES, device=CPU, clock=clock)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True))
    assert weights[0].grad.tolist() == [3.0] * 4
    assert all(p.grad is None for p in weights[1:])
    assert not any(m.training for m in net)


class Watching(nn.Module):
    """Notes the mode it runs in and draws a random number, as dropout does."""

    def __init__(self, seen: set[bool]) -> None:
        super().__init__()
        self.seen = seen
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        self.seen.add(self.training)
        return F.dropout(h * self.weight, training=self.training)


def test_frozen_layers_are_measured_in_eval_and_trained_ones_in_training_mode() -> None:
    frozen, trained = set[bool](), set[bool]()
    spec = PipelineSpec(
        inputs={"image": Field(shape=(4,))},
        frozen=(
            FrozenComponent(
                name="encoder",
                layers=(Layer(name="e", module=Watching(frozen), reads=("image",), writes=("e",)),),
            ),
        ),
        backbones=(
            Backbone(
                name="net",
                layers=(Layer(name="a", module=Watching(trained), reads=("e",), writes=("h",)),),
            ),
        ),
        loss=Loss(fn=lambda h: h.square().mean(1), reads=("h",)),
    )
    graph = trace(spec)
    binding = bind(spec, graph)
    frozen.clear()
    trained.clear()
    for layer in (spec.frozen[0].layers[0], spec.backbones[0].layers[0]):
        assert isinstance(layer.module, nn.Module)
        layer.module.train(layer.name == "e")
    measure_layers(binding, graph, samples=SIZES, device=CPU, clock=CountedClock())
    assert (frozen, trained) == ({False}, {True})


def transformer_spec() -> PipelineSpec:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    chain = [
        ("in", nn.Linear(4, 8)),
        ("gelu", nn.GELU()),  # keeps its input, which `in` wrote
        ("block", block),
        ("sigmoid", nn.Sigmoid()),  # keeps its output, which `out` keeps too
        ("out", nn.Linear(8, 4)),
    ]
    layers = tuple(
        Layer(name=n, module=m, reads=("x" if n == "in" else "h",), writes=("h",)) for n, m in chain
    )
    return PipelineSpec(
        inputs={"x": Field(shape=(5, 4)), "target": Field(shape=(5, 4))},
        backbones=(Backbone(name="net", layers=layers),),
        loss=Loss(fn=lambda h, t: (h - t).square().mean((1, 2)), reads=("h", "target")),
    )


def test_activation_bytes_sum_to_what_the_whole_chain_keeps() -> None:
    spec = transformer_spec()
    costs = measured(spec, CountedClock(), {"net": (2, 6)})["net"]
    modules = [layer.module for layer in spec.backbones[0].layers]
    weights = {p.untyped_storage().data_ptr() for m in modules for p in m.parameters()}
    for place, size in enumerate(costs.samples):
        x, target, kept = torch.randn(size, 5, 4), torch.randn(size, 5, 4), {}

        def pack(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            h = x
            for module in modules:
                h = module(h)
            loss = spec.losses()["net"].fn(h, target)
        outside = weights | {t.untyped_storage().data_ptr() for t in (x, target)}
        expected = sum(n for pointer, n in kept.items() if pointer not in outside)
        assert sum(layer.activation_bytes[place] for layer in costs.layers) == expected
        del loss
    by_name = {layer.name: layer.activation_bytes for layer in costs.layers}
    assert by_name["in"] == (0, 0)
    assert by_name["gelu"] == (2 * 5 * 8 * 4, 6 * 5 * 8 * 4)
    assert by_name["sigmoid"] == by_name["gelu"]


def test_autocast_copies_of_weights_are_not_activations() -> None:
    layers = (
        Layer(name="a", module=nn.Linear(64, 64), reads=("x",), writes=("h",)),
        Layer(name="b", module=nn.Linear(64, 64), reads=("h",), writes=("h",)),
    )
    spec = PipelineSpec(
        inputs={"x": Field(shape=(64,))},
        backbones=(Backbone(name="net", layers=layers),),
        loss=Loss(fn=lambda h: h.float().sum(1), reads=("h",)),
    )
    graph = trace(spec, autocast=torch.bfloat16)
    (cost,) = measure_layers(
        bind(spec, graph),
        graph,
        samples={"net": (3,)},
        device=CPU,
        autocast=torch.bfloat16,
        clock=CountedClock(),
    )
    assert cost.layers[0].activation_bytes == (3 * 64 * 2,)  # x in bfloat16
    assert cost.layers[1].activation_bytes == (3 * 64 * 2,)  # h, which is bfloat16


def test_a_used_up_budget_leaves_one_measurement_of_each() -> None:
    clock = CountedClock()
    spec = ticking_spec(clock)
    said: list[str] = []
    costs = measured(spec, clock, SIZES, budget_s=-1.0, progress=said.append)
    assert costs["net"].layers[1].forward_us == (14, 21)
    assert said[1:] == [
        "encoder at 1 samples", "encoder at 2 samples", "encoder at 4 samples",
        "net at 2 samples", "net at 3 samples",
    ]  # fmt: skip
    full = CountedClock()
    measured(ticking_spec(full), full, SIZES)
    assert clock.num_measured < full.num_measured / 2


def test_a_component_without_sizes_and_weights_elsewhere_are_refused() -> None:
    clock = CountedClock()
    spec = ticking_spec(clock)
    with pytest.raises(ProfileError, match=r"component 'net' has sizes \[\]"):
        measured(spec, clock, {"encoder": (1,)})
    with pytest.raises(ProfileError, match=r"'encoder' has sizes \[0, 1\]"):
        measured(spec, clock, {"encoder": (0, 1), "net": (1,)})
    graph = trace(spec)
    binding = bind(spec, graph)
    meta = torch.device("meta")
    with pytest.raises(ProfileError, match="is on cpu, the profile is of meta"):
        measure_layers(binding, graph, samples=SIZES, device=meta, clock=clock)


def test_long_work_is_repeated_less_and_short_work_more() -> None:
    repeats = Repeats(warmup=2, repeats=5, total_us=3e6)
    assert [repeats.count(us) for us in (0.0, 1e3, 1e5, 6e5, 7e5, 2e6, 1e8)] == [
        15, 15, 5, 5, 4, 3, 3,
    ]  # fmt: skip
    assert Repeats(repeats=1).count(1e9) == 1

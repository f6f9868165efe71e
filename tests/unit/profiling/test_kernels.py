"""Counted kernels against torch's own counter on real tensors, and against sums done by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_dpipe.core.graph import ModelGraph
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
from lightning_dpipe.profiling.kernels import Kernel, Work, count_work
from lightning_dpipe.runtime.bound import Binding


class Attend(nn.Module):
    """Self-attention over ``[batch, 6, 8]`` with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def conv_spec(device: str = "cpu") -> PipelineSpec:
    """A frozen convolution, then one trained, one locked, one trained."""
    torch.manual_seed(0)
    with torch.device(device):
        convs = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)]
        convs += [nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 3, 1)]
    convs[2].requires_grad_(False)
    names = ("encode", "first", "locked", "last")
    frozen, *layers = [
        Layer(name=n, module=c, reads=(r,), writes=(w,))
        for n, c, r, w in zip(
            names, convs, ("x", "y", "h", "h"), ("y", "h", "h", "out"), strict=True
        )
    ]
    return PipelineSpec(
        inputs={"x": Field(shape=(3, 8, 8))},
        frozen=(FrozenComponent(name="encoder", layers=(frozen,)),),
        backbones=(Backbone(name="net", layers=tuple(layers)),),
        loss=Loss(fn=lambda out: out.flatten(1).sum(1), reads=("out",)),
    )


def counted(spec: PipelineSpec) -> tuple[Binding, ModelGraph, Work]:
    graph = trace(spec)
    binding = bind(spec, graph)
    return binding, graph, count_work(binding, graph)


def test_flops_of_each_layer_are_torchs_for_a_batch_size_that_was_not_run() -> None:
    spec = conv_spec()
    _, _, work = counted(spec)
    values: dict[str, Tensor] = {"x": torch.randn(7, 3, 8, 8)}
    for name, layers in (("encoder", spec.frozen[0].layers), ("net", spec.backbones[0].layers)):
        for layer, found in zip(layers, work.at(name, 7), strict=True):
            read = (
                values[layer.reads[0]]
                .detach()
                .requires_grad_(name == "net" and found.name != "first")
            )
            with FlopCounterMode(display=False) as forward:
                made = layer.module(read)
            assert sum(k.flops for k in found.forward) == forward.get_total_flops()
            if name == "net":
                with FlopCounterMode(display=False) as backward:
                    torch.autograd.backward(made, torch.ones_like(made))
                assert sum(k.flops for k in found.backward) == backward.get_total_flops()
            values[layer.writes[0]] = made.detach()


def test_the_three_statuses_of_weights_have_the_backward_they_need() -> None:
    _, _, work = counted(conv_spec())
    (encode,), (first, locked, last) = work.at("encoder", 2), work.at("net", 2)
    assert encode.backward == encode.input_grad == ()
    assert encode.activation_bytes == 0

    def flops(kernels: tuple[Kernel, ...]) -> int:
        return sum(k.flops for k in kernels)

    # Its input comes from a frozen component: only the weight gradient.
    assert flops(first.backward) == flops(first.forward)
    assert first.input_grad == ()
    # Locked: only the input gradient.
    assert locked.backward == locked.input_grad
    assert flops(locked.backward) == flops(locked.forward)
    # Trained in the middle of the chain: both.
    assert flops(last.backward) == 2 * flops(last.forward)
    assert flops(last.input_grad) == flops(last.forward)


def test_bytes_and_kept_activations_of_a_matrix_product_are_those_of_its_operands() -> None:
    linear = nn.Linear(16, 32)
    spec = PipelineSpec(
        inputs={"x": Field(shape=(16,))},
        backbones=(
            Backbone(
                name="net",
                layers=(
                    Layer(name="a", module=nn.Linear(16, 16), reads=("x",), writes=("h",)),
                    Layer(name="b", module=linear, reads=("h",), writes=("out",)),
                ),
            ),
        ),
        loss=Loss(fn=lambda out: out.flatten(1).sum(1), reads=("out",)),
    )
    _, _, work = counted(spec)
    product = work.at("net", 10)[1].forward[0]
    assert product.name == "aten.addmm"
    assert product.num_bytes == 4 * (10 * 16 + 16 * 32 + 32 + 10 * 32)
    # `a` keeps x, which is the batch's own; `b` keeps h, whose writer did not need it.
    assert [layer.activation_bytes for layer in work.at("net", 10)] == [0, 4 * 10 * 16]


def test_attention_is_two_products_forward_and_four_backward() -> None:
    spec = PipelineSpec(
        inputs={"x": Field(shape=(6, 8))},
        backbones=(
            Backbone(
                name="net",
                layers=(
                    Layer(name="in", module=nn.Linear(8, 8), reads=("x",), writes=("h",)),
                    Layer(name="attend", module=Attend(), reads=("h",), writes=("out",)),
                ),
            ),
        ),
        loss=Loss(fn=lambda out: out.flatten(1).sum(1), reads=("out",)),
    )
    _, _, work = counted(spec)
    attend = work.at("net", 3)[1]
    products = 3 * 2 * (2 * 6 * 6 * 4 * 2)
    linear = 3 * 6 * 8 * 24 * 2
    assert sum(k.flops for k in attend.forward) == products + linear
    assert sum(k.flops for k in attend.backward) == 2 * (products + linear)


def test_weights_on_meta_count_the_same_and_are_left_alone() -> None:
    here, spec = counted(conv_spec())[2], conv_spec("meta")
    there = counted(spec)[2]
    for name in ("encoder", "net"):
        assert here.at(name, 4) == there.at(name, 4)
    weights = [p for c in spec.components for layer in c.layers for p in layer.parameters()]
    assert all(p.is_meta and p.grad is None for p in weights)


def test_weights_on_the_cpu_get_no_gradient_from_being_counted() -> None:
    spec = conv_spec()
    counted(spec)
    assert all(p.grad is None for x in spec.backbones[0].layers for p in x.parameters())

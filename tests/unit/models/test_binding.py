"""Binding keeps callables, positions and weights, and freezes what is frozen."""

import pytest
import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import (
    Backbone,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
    SelfConditioning,
)
from reference import run_once, sample_losses
from small import small_unet


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x)
        return x, h, h


def model() -> PipelineSpec:
    torch.manual_seed(0)
    encode = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    return PipelineSpec(
        inputs={"x": Field(shape=(3,)), "y": Field(shape=(3,))},
        frozen=(
            FrozenComponent(
                name="enc", layers=(Layer(name="e", module=encode, reads=("x",), writes=("e",)),)
            ),
        ),
        backbones=(
            Backbone(
                name="net",
                layers=(
                    Layer(name="two", module=Two(), reads=("e",), writes=("same", "h", "s")),
                    Layer(
                        name="add",
                        module=lambda a, b, c, est: a + b + c + est,
                        reads=("same", "h", "s", "est"),
                        writes=("out",),
                    ),
                ),
            ),
        ),
        loss=Loss(fn=lambda out, y: (out - y).abs().sum(1), reads=("out", "y")),
        self_conditioning=SelfConditioning(
            writes="est", estimate=lambda out: out * 2, reads=("out",), shape=(3,)
        ),
    )


def test_aliases_are_left_out_of_writes_and_positions_are_those_of_the_outputs() -> None:
    spec = model()
    graph = trace(spec)
    binding = bind(spec, graph)
    two, add = binding.layers["net"]
    (h,) = graph.backbones[0].layers[0].writes
    assert two.writes == ((1, h),)
    assert add.reads == (two.reads[0], h, h, binding.feedback.writes if binding.feedback else -1)
    assert len(two.parameters) == 2
    assert len(two.modules) == 2
    assert binding.value_id("y") == 1
    assert binding.draw_key is None
    with pytest.raises(SpecError, match=r"'z' is not a batch field.*declares: x, y"):
        binding.value_id("z")


def test_binding_freezes_frozen_components_and_nothing_else() -> None:
    spec = model()
    graph = trace(spec)
    frozen, trained = spec.frozen[0].layers[0], spec.backbones[0].layers[0]
    assert all(p.requires_grad for p in frozen.parameters())
    bind(spec, graph)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not any(m.training for m in frozen.modules())
    assert all(p.requires_grad for p in trained.parameters())
    assert all(m.training for m in trained.modules())


def test_a_graph_of_another_model_is_refused() -> None:
    other = small_unet(2)
    with pytest.raises(SpecError, match="no component"):
        bind(model(), trace(other))
    with pytest.raises(SpecError, match="or other names; trace this spec again"):
        bind(small_unet(3), trace(other))


@pytest.mark.parametrize("fed_back", [False, True])
def test_the_reference_is_the_model_written_out(fed_back: bool) -> None:
    spec = model()
    graph = trace(spec)
    binding = bind(spec, graph)
    x, y, est = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 3)
    values = run_once(binding, graph, {"x": x, "y": y}, feedback=est if fed_back else None)
    encode, two = spec.frozen[0].layers[0].module, spec.backbones[0].layers[0].module
    assert isinstance(encode, nn.Sequential)
    assert isinstance(two, Two)
    with torch.no_grad():
        e = encode[0](x)
    h = two.linear(e)
    out = e + h + h + (est if fed_back else torch.zeros(5, 3))
    assert torch.equal(values[graph.losses[0].reads[0]], out)
    losses = sample_losses(binding, values)["net"]
    assert torch.equal(losses, (out - y).abs().sum(1))
    losses.sum().backward()
    assert all(p.grad is not None for p in two.parameters())
    assert all(p.grad is None for p in encode.parameters())


def test_a_missing_batch_field_is_named() -> None:
    spec = model()
    graph = trace(spec)
    with pytest.raises(SpecError, match="the batch lacks y; it has x"):
        run_once(bind(spec, graph), graph, {"x": torch.zeros(1, 3)})

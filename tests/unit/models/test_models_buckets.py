"""Shape classes of a spec: traced one by one, recognised by shape, refused by name."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bucketed import SIDES, bucketed_spec
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.buckets import trace_buckets
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Backbone, Field, Layer, Loss, PipelineSpec


def test_each_class_is_what_tracing_its_shapes_alone_gives() -> None:
    spec = bucketed_spec(selfcond=True)
    graphs = trace_buckets(spec)
    assert list(graphs) == list(SIDES) == list(spec.buckets)
    for name, (high, wide) in SIDES.items():
        alone = replace(bucketed_spec(selfcond=True, buckets=False))
        alone = replace(
            alone,
            inputs={**alone.inputs, "image": Field(shape=(3, high, wide))},
            self_conditioning=replace(alone.self_conditioning, shape=(4, high // 2, wide // 2)),
        )
        assert graphs[name] == trace(alone)


def test_a_batch_is_recognised_by_its_shapes() -> None:
    spec = bucketed_spec()
    for name, sides in SIDES.items():
        fields = {"image": torch.zeros(2, 3, *sides), "input_ids": torch.zeros(2, 5).long()}
        assert spec.bucket_of(fields) == name


@pytest.mark.parametrize(
    ("image", "tokens", "message"),
    [
        ((3, 9, 9), 5, r"'image' \(3, 9, 9\) belong.*base: image \(3, 16, 16\); wide: image"),
        ((3, 16, 16), 6, r"'input_ids' \(6,\) belong"),
    ],
)
def test_an_unknown_shape_is_refused_with_field_shape_and_known_classes(
    image: tuple[int, ...], tokens: int, message: str
) -> None:
    fields = {"image": torch.zeros(2, *image), "input_ids": torch.zeros(2, tokens).long()}
    with pytest.raises(SpecError, match=message):
        bucketed_spec().bucket_of(fields)


def test_shapes_of_two_classes_together_are_refused() -> None:
    spec = tiny(shapes={"wide": {"x": (6,), "y": (6,)}})
    with pytest.raises(SpecError, match=r"'x' \(6,\), 'y' \(4,\) belong to no shape class"):
        spec.bucket_of({"x": torch.zeros(1, 6), "y": torch.zeros(1, 4)})


class Net(nn.Module):
    """Works on any width; with `alias` a wide input is handed on as it is."""

    def __init__(self, alias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.alias = alias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = x * self.weight
        return out, out if self.alias and x.shape[1] > 4 else out + 1


def tiny(*, alias: bool = False, **options) -> PipelineSpec:
    layer = Layer(name="net", module=Net(alias), reads=("x",), writes=("h", "skip"))
    return PipelineSpec(
        inputs={"x": Field(shape=(4,)), "y": Field(shape=(4,))},
        backbones=(Backbone(name="net", layers=(layer,)),),
        loss=Loss(
            fn=lambda h, skip, y: (h + skip - y).square().mean(1), reads=("h", "skip", "y")
        ),
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"wide": {"z": (6,)}}, "'wide' declares a shape of 'z'; shapes can be given for: x, y"),
        ({"wide": {}}, "'base' and 'wide' give every batch field the same shape"),
        ({"a": {"x": (6,)}, "b": {"x": (6,)}}, "'a' and 'b' give every"),
        ({BASE: {"x": (6,)}}, "'base' is what `inputs` declares; rename yours"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(shapes, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        tiny(shapes=shapes)


def test_a_class_whose_layers_do_other_work_is_refused() -> None:
    both = {"wide": {"x": (6,), "y": (6,)}}
    assert list(trace_buckets(tiny(shapes=both))) == [BASE, "wide"]
    with pytest.raises(SpecError, match="'wide' changes the number of values: 3 instead of 4"):
        trace_buckets(tiny(alias=True, shapes=both))


def test_a_class_that_no_layer_can_run_is_named() -> None:
    with pytest.raises(SpecError, match=r"shape class 'odd': .*failed on fake tensors"):
        trace_buckets(tiny(shapes={"odd": {"x": (6,)}}))


def test_a_class_that_is_not_declared_is_refused() -> None:
    with pytest.raises(SpecError, match="no shape class 'tall'; declared are base, wide"):
        tiny(shapes={"wide": {"x": (6,), "y": (6,)}}).in_bucket("tall")

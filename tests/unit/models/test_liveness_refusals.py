"""Specs that cannot be cut, or that are inconsistent, are refused by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import DRAW_KEY, Field, Loss, PipelineSpec
from unit.models.chain import WIDTH, Fork, conditioned, encoder, error, layer, spec


class Norm(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), kind(WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x))
        return normed


SHARED = nn.Linear(WIDTH, WIDTH)
FROZEN_TWIN = nn.Linear(WIDTH, WIDTH)


def in_place(x: Tensor) -> Tensor:
    return x.add_(1)


REFUSED: list[tuple[str, Callable[[], PipelineSpec], str]] = [
    (
        "unwritten",
        lambda: spec(layer("a", "x", "h"), layer("b", "nowhere", "out")),
        r"net\.b reads 'nowhere', which nothing before it writes; available there: draw_key, h, "
        "target, x",
    ),
    (
        "unwritten in a frozen component",
        lambda: spec(frozen=(encoder(layer("a", "x", "h"), layer("b", "gone", "e")),)),
        r"enc\.b reads 'gone'.*available there: draw_key, h, target, x",
    ),
    (
        "cycle",
        lambda: spec(
            frozen=(
                encoder(layer("a", "q", "p"), name="one"),
                encoder(layer("b", "p", "q"), name="two"),
            )
        ),
        r"one\.a reads 'q', but the frozen components one, two wait for each other; "
        "available there: target, x",
    ),
    (
        "ambiguous",
        lambda: spec(
            layer("a", "e", "out"),
            frozen=(
                encoder(layer("a", "x", "e"), name="one"),
                encoder(layer("b", "x", "e"), name="two"),
            ),
        ),
        r"net\.a reads 'e', which comes from one and from two; rename",
    ),
    (
        "loss reads an unwritten name",
        lambda: spec(loss=Loss(fn=error, reads=("prediction", "target"))),
        r"the loss of net reads 'prediction'.*available there: draw_key, h, out, target, x",
    ),
    ("no backbone", lambda: spec(backbones=()), "no backbone"),
    ("no layers", lambda: spec(frozen=(encoder(),)), "component 'enc' has no layers"),
    (
        "component twice",
        lambda: spec(frozen=(encoder(layer("a", "x", "e"), name="net"),)),
        "two components named 'net'",
    ),
    (
        "layer twice",
        lambda: spec(layer("a", "x", "h"), layer("a", "h", "out")),
        "net has two layers named 'a'",
    ),
    (
        "name written twice by a layer",
        lambda: spec(layer("a", "x", "out out", Fork())),
        r"net\.a has two written tensors named 'out'",
    ),
    (
        "the engine's own field",
        lambda: spec(inputs={DRAW_KEY: Field(shape=(2,))}),
        "input 'draw_key' is added by the engine",
    ),
    (
        "no trained weights",
        lambda: spec(layer("a", "x", "out", nn.Linear(WIDTH, WIDTH).requires_grad_(False))),
        "backbone 'net' has no trained weights",
    ),
    (
        "shared weight",
        lambda: spec(layer("a", "x", "h", SHARED), layer("b", "h", "out", SHARED)),
        r"net\.a and net\.b share a trained weight of shape \[4, 4\].*named tensor",
    ),
    (
        "weight shared with a frozen component",
        lambda: spec(
            layer("a", "e", "out", FROZEN_TWIN),
            frozen=(encoder(layer("f", "x", "e", FROZEN_TWIN)),),
        ),
        r"enc\.f is frozen but shares a weight .* with net\.a",
    ),
    (
        "weight of nobody",
        lambda: spec(layer("a", "x", "out", lambda x: SHARED(x) + 1), layer("b", "x", "h")),
        r"net\.a uses a trained weight of shape \[4, 4\] that it does not own",
    ),
    (
        "weight in the loss",
        lambda: spec(loss=Loss(fn=lambda o, t: error(SHARED(o), t), reads=("out", "target"))),
        "the loss of net uses a trained weight",
    ),
    (
        "number of outputs",
        lambda: spec(layer("a", "x", "out more")),
        r"net\.a returns 1 tensors but writes 2 names \(out, more\)",
    ),
    (
        "not a tensor",
        lambda: spec(layer("a", "x", "out h", lambda x: (x, None))),
        r"net\.a returns a NoneType; return a tensor",
    ),
    (
        "no batch dimension",
        lambda: spec(layer("a", "x", "h", lambda x: x.mean()), layer("b", "x", "out")),
        r"net\.a writes 'h' with shape \[\] for 3 samples",
    ),
    (
        "a constant with as many rows as the fake batch",
        lambda: spec(layer("a", "x", "h", lambda x: x.new_ones(3, 2)), layer("b", "x", "out")),
        r"net\.a writes 'h' with shape \[3, 2\] for 2 samples; the first dimension must count",
    ),
    (
        "unknown dtype",
        lambda: spec(layer("a", "x", "h", lambda x: x.to(torch.complex64)), layer("b", "x", "out")),
        r"net\.a writes 'h' as complex64",
    ),
    (
        "needs numbers",
        lambda: spec(layer("a", "x", "out", lambda x: x * x.sum().item())),
        r"net\.a failed on fake tensors \(x torch.float32 \[3, 4\]\)",
    ),
    (
        "in place",
        lambda: spec(layer("a", "x", "h", in_place), layer("b", "h", "out")),
        r"net\.a changes 'x' in place",
    ),
    (
        "mean loss",
        lambda: spec(loss=Loss(fn=lambda o, t: error(o, t).mean(), reads=("out", "target"))),
        r"the loss of net returns torch.float32 \[\] for 3 samples",
    ),
    (
        "detached loss",
        lambda: spec(loss=Loss(fn=lambda o, t: error(o.detach(), t), reads=("out", "target"))),
        "the loss of net depends on no trained weight",
    ),
    (
        "estimate nobody reads",
        lambda: conditioned(writes="other"),
        r"reads 'estimate', which nothing before it writes",
    ),
    (
        "estimate of another dtype",
        lambda: conditioned(dtype=torch.bfloat16),
        r"the self-conditioning estimate returns torch.float32 \[3, 4\] for 3 samples; expected "
        r"torch.bfloat16 \[3, 4\]",
    ),
]


@pytest.mark.parametrize(("make", "message"), [x[1:] for x in REFUSED], ids=[x[0] for x in REFUSED])
def test_inconsistent_specs_are_refused_by_name(
    make: Callable[[], PipelineSpec], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        trace(make())


def test_an_estimate_must_have_exactly_one_reader() -> None:
    given = replace(spec(), self_conditioning=conditioned().self_conditioning)
    with pytest.raises(SpecError, match=r"read by 0 backbones \(none\)"):
        trace(given)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.BatchNorm1d, {}),
        (nn.BatchNorm1d, {"affine": False}),
        (nn.BatchNorm1d, {"track_running_stats": False}),
        (nn.SyncBatchNorm, {}),
    ],
)
def test_batch_statistics_in_a_backbone_are_refused_by_name(
    kind: Callable[..., nn.Module], options: dict[str, Any]
) -> None:
    norm = Norm(kind, **options)
    with pytest.raises(UnsupportedError, match=r"net\.a contains a (Sync)?BatchNorm"):
        trace(spec(layer("a", "x", "out", norm)))
    if kind is nn.BatchNorm1d:
        frozen = spec(layer("a", "e", "out"), frozen=(encoder(layer("n", "x", "e", norm)),))
        trace(frozen)


@pytest.mark.parametrize("draw", [torch.rand_like, lambda x: torch.randn(x.shape)])
def test_unkeyed_draws_in_frozen_layers_are_refused(draw: Callable[[Tensor], Tensor]) -> None:
    def noise(x: Tensor) -> Tensor:
        return x + draw(x)

    frozen = (encoder(layer("n", "x", "e", noise)),)
    with pytest.raises(UnsupportedError, match=r"enc\.n draws from torch's global generator"):
        trace(spec(layer("a", "e", "out"), frozen=frozen))

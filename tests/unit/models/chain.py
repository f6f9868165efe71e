"""Small specs of linear layers that the tests of tracing vary."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.models.spec import (
    Backbone,
    Field,
    FrozenComponent,
    Layer,
    Loss,
    PipelineSpec,
    SelfConditioning,
)

WIDTH = 4


def error(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean(1)


def layer(
    name: str, reads: str, writes: str, module: Callable[..., Any] | None = None, **options: Any
) -> Layer:
    return Layer(
        name=name,
        module=nn.Linear(WIDTH, WIDTH) if module is None else module,
        reads=tuple(reads.split()),
        writes=tuple(writes.split()),
        **options,
    )


def spec(*layers: Layer, frozen: tuple[FrozenComponent, ...] = (), **options: Any) -> PipelineSpec:
    given_layers = layers or (layer("first", "x", "h"), layer("last", "h", "out"))
    arguments: dict[str, Any] = {
        "inputs": {"x": Field(shape=(WIDTH,)), "target": Field(shape=(WIDTH,))},
        "frozen": frozen,
        "backbones": (Backbone(name="net", layers=given_layers),),
        "loss": Loss(fn=error, reads=("out", "target")),
    }
    return PipelineSpec(**{**arguments, **options})


def encoder(*layers: Layer, name: str = "enc") -> FrozenComponent:
    return FrozenComponent(name=name, layers=layers)


class Fork(nn.Module):
    """Pushes its output: one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return h, h


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, *xs: Tensor) -> Tensor:
        return self.scale * sum(xs)


def conditioned(**changes: Any) -> PipelineSpec:
    arguments: dict[str, Any] = {
        "writes": "estimate",
        "estimate": lambda out, x: (out - x).clamp(-1, 1),
        "reads": ("out", "x"),
        "shape": (WIDTH,),
    }
    return spec(
        layer("first", "x estimate", "h", Sum()),
        layer("last", "h", "out"),
        self_conditioning=SelfConditioning(**{**arguments, **changes}),
    )

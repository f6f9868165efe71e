"""Keys are equal for equal code, options and shapes, and for nothing else."""

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.profiling import kernels
from lightning_dpipe.profiling.kernels import count_work
from lightning_dpipe.profiling.likeness import likeness
from recipe import built


@dataclass(frozen=True)
class Scaled:
    module: nn.Module
    factor: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) * self.factor


class Option:
    def __init__(self, value: Any) -> None:
        self.value = value


def block(width: int = 4, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width, **options), nn.GELU())


def test_modules_with_other_weights_are_alike() -> None:
    one, other = block(), block()
    assert not torch.equal(one[0].weight, other[0].weight)
    assert likeness(one) == likeness(other) == likeness(copy.deepcopy(one))
    assert likeness(Scaled(one, 2.0)) == likeness(Scaled(other, 2.0))
    assert likeness(one.forward) == likeness(other.forward)


def differences() -> dict[str, tuple[Any, Any]]:
    frozen, trained, tied, hooked, evaluated = (block() for _ in range(5))
    frozen[0].requires_grad_(False)
    hooked.register_forward_hook(lambda *_: None)
    evaluated.eval()
    untied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied = nn.Sequential(first := nn.Linear(4, 4), first)
    return {
        "width": (block(), block(5)),
        "option": (block(), block(eps=1e-6)),
        "factor": (Scaled(trained, 1.0), Scaled(trained, 2.0)),
        "type of a number": (Option(1), Option(True)),
        "frozen": (frozen, trained),
        "mode": (evaluated, trained),
        "hook": (hooked, trained),
        "tied": (tied, untied),
        "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        "stride": (torch.zeros(2, 3), torch.zeros(3, 2).T),
        "class": (nn.GELU(), nn.SiLU()),
        "unknown objects": (functools.partial(len), functools.partial(len)),
        "functions": (lambda x: x, lambda x: x),
    }


@pytest.mark.parametrize("name", differences())
def test_what_may_matter_makes_a_difference(name: str) -> None:
    one, other = differences()[name]
    assert likeness(one) == likeness(one)
    assert likeness(one) != likeness(other)


@pytest.mark.parametrize("recipe", ["dit_tiny", "flux_tiny"])
def test_counting_equal_blocks_once_changes_no_count(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flux's blocks return two views of one tensor."""
    spec = built(recipe).spec
    graph = trace(spec)
    binding = bind(spec, graph)
    run: list[str] = []
    count_layer = kernels._Count._layer

    def counting(self: Any, layer: Any, *more: Any) -> Any:
        run.append(layer.name)
        return count_layer(self, layer, *more)

    monkeypatch.setattr(kernels._Count, "_layer", counting)
    shared, few = count_work(binding, graph), len(run)
    number = itertools.count()
    monkeypatch.setattr(kernels, "likeness", lambda _: next(number))
    alone = count_work(binding, graph)
    assert few < len(run) - few
    for component in graph.components:
        for samples in (1, 7):
            name = component.name
            assert shared.at(name, samples) == alone.at(name, samples)

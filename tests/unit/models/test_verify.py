"""The guard notices any difference between a layer list and the library, and names it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Layer
from lightning_dpipe.models.verify import Trial, compare, verify_once


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(self.first(x)).tanh())
        return out


def trial(middle: Callable[[Tensor], Tensor] = torch.tanh) -> Trial:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 3)
    layers = (
        Layer(name="first", module=model.first, reads=("x",), writes=("h",)),
        Layer(name="drop", module=model.drop, reads=("h",), writes=("h",)),
        Layer(name="middle", module=middle, reads=("h",), writes=("h",)),
        Layer(name="second", module=model.second, reads=("h",), writes=("out",)),
    )
    return Trial(
        model=model, layers=layers, inputs={"x": x}, output="out", forward=lambda: model(x)
    )


def test_equal_lists_pass_even_with_dropout() -> None:
    compare(trial())


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (torch.sin, "out is off by up to"),
        (lambda h: h.tanh().detach(), "the gradient of first.weight exists only in the library"),
        (lambda h: 2 * h.tanh() - h.tanh().detach(), r"the gradient of first.weight is off by"),
        (lambda h: h.tanh()[:1], r"out is \[1, 3\] instead of \[2, 3\]"),
    ],
)
def test_the_first_difference_is_named(middle: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(SpecError, match=f"layer list of Model differs .*{message}"):
        compare(trial(middle))


def test_a_configuration_is_checked_once_and_leaves_the_random_state_alone() -> None:
    made: list[Trial] = []

    def make() -> Trial:
        made.append(replace(trial()))
        return made[-1]

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    verify_once("test_verify: once", make)
    verify_once("test_verify: once", make)
    assert len(made) == 1
    assert torch.equal(torch.rand(3), expected)


def test_a_failed_check_fails_again() -> None:
    for _ in range(2):
        with pytest.raises(SpecError, match="out is off"):
            verify_once("test_verify: fails", lambda: trial(torch.sin))


def test_the_check_computes_even_while_models_are_built_on_meta() -> None:
    with torch.device("meta"), pytest.raises(SpecError, match="out is off"):
        verify_once("test_verify: meta", lambda: trial(torch.sin))

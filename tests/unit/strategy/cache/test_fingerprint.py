"""Digests of what a layer computes: equal for equal layers, other ones after any change."""

import functools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dpipe.strategy.cache.fingerprint import Fingerprint


def digest(thing: object) -> str:
    return Fingerprint().of(thing)


class Scaled(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.inner = nn.Linear(2, 2)
        self.register_buffer("shift", torch.zeros(2))


@dataclass(frozen=True)
class Draw:
    seed: int
    table: np.ndarray


def module(**changes: float) -> Scaled:
    torch.manual_seed(0)
    return Scaled(**changes)


def closure(module: nn.Module, scale: float):
    def run(x):
        return module(x) * scale

    return run


def test_two_equal_objects_have_one_digest() -> None:
    for make in (
        module,
        lambda: closure(module(), 2.0),
        lambda: functools.partial(math.pow, 2.0),
        lambda: Draw(3, np.arange(3)),
        lambda: module().forward,
        lambda: {"b": torch.ones(2), "a": {1, 2}},
    ):
        assert digest(make()) == digest(make())


def test_every_change_gives_another_one() -> None:
    weights, buffers, dtypes = module(), module(), module().double()
    with torch.no_grad():
        weights.inner.weight[0, 0] += 1e-7
        buffers.shift[1] = 1.0
    wider = module()
    wider.extra = nn.Identity()
    layers = [
        module(), module(factor=2.0), weights, buffers, dtypes, wider,
        closure(module(), 2.0), closure(module(), 3.0), closure(weights, 2.0),
        Draw(3, np.arange(3)), Draw(4, np.arange(3)), Draw(3, np.arange(3) + 1),
        lambda x: x + 1, lambda x: x + 2, lambda x, y=1: x + 1,
    ]  # fmt: skip
    assert len({digest(x) for x in layers}) == len(layers)


def test_where_weights_were_loaded_from_does_not_matter() -> None:
    one, other = module(), module()
    one.name_or_path, other.name_or_path = "here", "there"
    assert digest(one) == digest(other)
    one.training = False
    assert digest(one) == digest(other)


def test_a_cycle_ends() -> None:
    one, other = module(), module()
    for each in (one, other):
        each.__dict__["owner"] = {"me": each}
    assert digest(one) == digest(other)


def test_an_edited_class_counts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_layer.py"
    found = []
    for constant in ("1", "2"):
        file.write_text(
            "import torch\nclass L(torch.nn.Module):\n"
            f"    def forward(self, x):\n        return x + {constant}\n"
        )
        importlib.invalidate_caches()
        loaded = importlib.import_module("edited_layer")
        found.append(digest(importlib.reload(loaded).L()))
    assert found[0] != found[1]

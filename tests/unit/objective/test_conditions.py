"""Conditions without an encoder: joined captions, sizes, constants."""

import pytest
import torch

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.objective.conditions import (
    constant_component,
    joined_captions,
    size_component,
)


def test_captions_are_joined_side_by_side_and_padded_to_t5s_width() -> None:
    (layer,) = joined_captions(("a", "b"), ("p", "q"), "t").layers
    assert layer.reads == ("a", "b", "p", "q", "t")
    a, b, t = torch.randn(2, 3, 4), torch.randn(2, 3, 2), torch.randn(2, 5, 9)
    p, q = torch.randn(2, 4), torch.randn(2, 2)
    context, pooled = layer.module(a, b, p, q, t)
    assert context.shape == (2, 8, 9)
    assert torch.equal(context[:, :3, :4], a)
    assert torch.equal(context[:, :3, 4:6], b)
    assert not context[:, :3, 6:].any()
    assert torch.equal(context[:, 3:], t)
    assert torch.equal(pooled, torch.cat([p, q], dim=1))
    with pytest.raises(SpecError, match="a width of 6 together, T5's of 5"):
        layer.module(a, b, p, q, t[..., :5])


def test_sizes_and_constants_are_rows_of_the_batch() -> None:
    (layer,) = size_component().layers
    resolution, ratio = layer.module(torch.zeros(3, 3, 32, 64))
    assert resolution.tolist() == [[32.0, 64.0]] * 3
    assert ratio.tolist() == [[0.5]] * 3
    (layer,) = constant_component(3.5, like="x", writes="guidance").layers
    made = layer.module(torch.zeros(2, 7, dtype=torch.bfloat16))
    assert made.tolist() == [3.5, 3.5]
    assert made.dtype is torch.float32

"""Condition dropout: who loses the condition, and what remains of it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.objective.dropout import caption_dropout, context_dropout, label_dropout


def keys(batch: int, slots: int) -> torch.Tensor:
    return torch.tensor([(batch, slot) for slot in range(slots)])


def test_the_asked_share_of_captions_is_zeroed_and_the_rest_untouched() -> None:
    (layer,) = context_dropout(0.1, seed=0).layers
    encoded = torch.randn(4000, 2, 3)
    context = layer.module(encoded, keys(0, 4000))
    dropped = (context == 0).flatten(1).all(1)
    assert torch.equal(context[~dropped], encoded[~dropped])
    assert abs(dropped.double().mean() - 0.1) < 5 * 0.3 * 4000**-0.5


def test_the_choice_is_the_samples_own_and_changes_with_the_batch() -> None:
    (layer,) = label_dropout(0.5, seed=0, null_class=10).layers
    label, key = torch.zeros(64, dtype=torch.int64), keys(3, 64)
    whole = layer.module(label, key)
    assert torch.equal(layer.module(label[20:], key[20:]), whole[20:])
    assert not torch.equal(layer.module(label, keys(4, 64)), whole)
    assert set(whole.tolist()) == {0, 10}


def test_padding_is_zeroed_too_when_a_mask_is_named() -> None:
    component = context_dropout(0.0, seed=0, mask="attention_mask")
    (layer,) = component.layers
    assert layer.reads == ("encoded", "attention_mask", "draw_key")
    encoded, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = encoded * mask[..., None]
    assert torch.equal(layer.module(encoded, mask, keys(0, 2)), expected)


def test_kept_captions_are_scaled() -> None:
    encoded, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.int64)
    (plain,) = context_dropout(0.0, seed=0, scale=2.0).layers
    (masked,) = context_dropout(0.0, seed=0, scale=2.0, mask="attention_mask").layers
    assert torch.equal(plain.module(encoded, keys(0, 2)), 2 * encoded)
    assert torch.equal(masked.module(encoded, mask, keys(0, 2)), 2 * encoded)


def test_nan_padding_does_not_survive_the_mask() -> None:
    """A product with the mask would keep it; encoders may leave anything in padded rows."""
    (layer,) = context_dropout(0.0, seed=0, mask="attention_mask").layers
    encoded = torch.full((1, 2, 3), float("nan"))
    encoded[:, 0] = 1.0
    context = layer.module(encoded, torch.tensor([[1, 0]]), keys(0, 1))
    assert context.isfinite().all()


def test_dropped_captions_become_the_empty_one() -> None:
    (layer,) = caption_dropout(0.5, seed=0, empty={"ids": (1, 2, 0), "mask": (1, 1, 0)}).layers
    ids, mask = torch.full((64, 3), 9), torch.ones(64, 3, dtype=torch.int64)
    new_ids, new_mask = layer.module(ids, mask, keys(0, 64))
    dropped = new_ids[:, 0] == 1
    assert 0 < dropped.sum() < 64
    assert (new_ids[dropped] == torch.tensor([1, 2, 0])).all()
    assert (new_mask[dropped] == torch.tensor([1, 1, 0])).all()
    assert (new_ids[~dropped] == 9).all()
    assert (new_mask[~dropped] == 1).all()


@pytest.mark.parametrize(("probability", "count"), [(0.0, 0), (1.0, 50)])
def test_the_bounds_drop_nobody_and_everybody(probability: float, count: int) -> None:
    (layer,) = label_dropout(probability, seed=0, null_class=10).layers
    dropped = layer.module(torch.zeros(50, dtype=torch.int64), keys(0, 50)) == 10
    assert dropped.sum() == count


def test_validation_drops_nobody() -> None:
    (layer,) = label_dropout(1.0, seed=0, null_class=10).layers
    assert (layer.module(torch.zeros(50, dtype=torch.int64), keys(-1, 50)) == 0).all()


def test_a_fake_tensor_trace_gets_through() -> None:
    (context,) = context_dropout(0.1, seed=0, mask="m").layers
    (caption,) = caption_dropout(0.1, seed=0, empty={"ids": (1, 2), "mask": (1, 0)}).layers
    (label,) = label_dropout(0.1, seed=0, null_class=10).layers
    with FakeTensorMode():
        ids, key = torch.ones(3, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
        assert context.module(torch.empty(3, 2, 8), ids, key).shape == (3, 2, 8)
        assert caption.module(ids, ids, key)[0].shape == (3, 2)
        assert label.module(ids[:, 0], key).shape == (3,)


def test_nonsense_is_refused() -> None:
    with pytest.raises(SpecError, match=r"probability is 1.5"):
        context_dropout(1.5, seed=0)
    with pytest.raises(SpecError, match=r"'ids': 3, 'mask': 2"):
        caption_dropout(0.1, seed=0, empty={"ids": (1, 2, 3), "mask": (1, 1)})

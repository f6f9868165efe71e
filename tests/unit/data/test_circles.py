"""Drawn circles: what a picture, its outline and its caption say is the same."""

import pytest
import torch

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.circles import WORDS, Circle, CirclesDataModule, draw_circle
from lightning_dpipe.data.shapes import COLOURS

RED_ON_BLUE = Circle(inside="red", around="blue", x=0.5, y=0.25, radius=0.2)


def test_the_colours_are_the_captions_and_the_outline_is_the_border() -> None:
    image, hint = draw_circle(RED_ON_BLUE, 64)
    assert image.shape == hint.shape == (3, 64, 64)
    assert torch.allclose(image[:, 16, 32], torch.tensor(COLOURS["red"]) * 2 - 1)
    assert torch.allclose(image[:, 60, 32], torch.tensor(COLOURS["blue"]) * 2 - 1)
    assert hint[0, 16, 32] == hint[0, 60, 32] == 0  # row 16 = y 0.25
    assert hint[0, 16, 44] == 1  # x 0.7 = 0.5 + 0.2
    assert hint.min() >= 0
    assert hint.max() <= 1
    assert RED_ON_BLUE.caption == "red circle on blue"


def test_a_sample_has_its_captions_words() -> None:
    data = CirclesDataModule(batch_size=4, size=16, num_samples=8, num_tokens=7)
    batch = next(iter(data.val_dataloader()))
    for ids, caption in zip(batch["input_ids"], data.validation_captions, strict=False):
        assert [WORDS[i] for i in ids] == ["[start]", *caption.split(), "[end]", "[pad]"]


def test_the_seed_says_which_circles_and_the_splits_differ() -> None:
    one, same, other = (CirclesDataModule(size=16, num_samples=24, seed=s) for s in (0, 0, 1))
    drawn = [d._train.circles for d in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert not set(one._train.circles) & set(one._validation.circles)
    assert all(c.inside != c.around for c in one._train.circles)


@pytest.mark.parametrize("wrong", [{"num_tokens": 5}, {"num_samples": 0}, {"size": 0}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match=str(*wrong.values())):
        CirclesDataModule(**wrong)

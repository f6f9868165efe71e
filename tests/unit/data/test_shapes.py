"""Drawn shapes: what a caption says is what the picture shows."""

import torch

from lightning_dpipe.data.shapes import COLOURS, NUM_TOKENS, SHAPES, WORDS, ShapesDataModule


def test_captions_and_tokens_name_the_same_thing() -> None:
    data = ShapesDataModule(batch_size=24)
    batch = next(iter(data.val_dataloader()))
    spoken = [" ".join(WORDS[i] for i in ids[1:3]) for ids in batch["input_ids"].tolist()]
    assert tuple(spoken) == data.validation_captions
    assert batch["input_ids"].shape == (24, NUM_TOKENS)
    assert batch["attention_mask"].all()


def test_the_ink_has_the_captions_colour_and_shapes_differ() -> None:
    data = ShapesDataModule(batch_size=24, size=32)
    images = next(iter(data.val_dataloader()))["image"]
    assert images.shape == (24, 3, 32, 32)
    for image, caption in zip(images, data.validation_captions, strict=True):
        ink = torch.tensor(COLOURS[caption.split()[0]]) * 2 - 1
        assert torch.allclose(image[:, 16, 16], ink, atol=1e-6)
        assert torch.equal(image[:, 0, 0], torch.ones(3))
    areas = [int((image != 1).any(0).sum()) for image in images[: len(SHAPES)]]
    assert len(set(areas)) == len(SHAPES)


def test_training_images_are_all_different() -> None:
    images = ShapesDataModule().train_dataloader().dataset.fields["image"]  # type: ignore[attr-defined]
    assert len({image.numpy().tobytes() for image in images}) == len(images) == 24 * 36

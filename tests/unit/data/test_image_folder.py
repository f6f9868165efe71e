"""A folder of captioned images as batches: splits, hints, broken files."""

import json
import logging
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.image_folder import ImageFolderDataModule
from saved import save_tokenizer

COLOURS = {"a": (255, 0, 0), "b": (0, 255, 0)}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline folder with nothing but a tokenizer of the letters a and b."""
    save_tokenizer(tmp_path / "pipeline" / "tokenizer")
    return tmp_path / "pipeline"


def images(folder: Path, captions: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, caption in enumerate(captions):
        Image.new("RGB", (6, 4), COLOURS[caption]).save(folder / f"{i}.png")
        Image.new("L", (6, 4), 255 * i // max(len(captions) - 1, 1)).save(folder / f"{i}h.png")
        lines.append({"file_name": f"{i}.png", "text": caption, "outline": f"{i}h.png"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def build(folder: Path, pipeline: Path, **changes: object) -> ImageFolderDataModule:
    options: dict[str, object] = {"size": 4, "num_tokens": 4, "num_workers": 0, "batch_size": 2}
    data = ImageFolderDataModule(
        folder=folder,
        tokenizer=str(pipeline),
        **{**options, **changes},  # type: ignore[arg-type]
    )
    data.setup()
    return data


def test_image_caption_and_hint_stay_together(tmp_path: Path, pipeline: Path) -> None:
    folder = images(tmp_path / "set", "abbab")
    data = build(folder, pipeline, num_validation=2, hint_column="outline")
    assert data.validation_captions == ("a", "b")  # files 0 and 2
    batch = next(iter(data.val_dataloader()))
    assert batch["input_ids"].tolist() == [[1, 5, 2, 0], [1, 6, 2, 0]]
    assert batch["image"][:, :, 0, 0].tolist() == [[1, -1, -1], [-1, 1, -1]]
    torch.testing.assert_close(batch["hint"][:, 0, 0, 0], torch.tensor([0.0, 127 / 255]))
    seen = torch.cat([b["input_ids"][:, 1] for b in data.train_dataloader()])
    assert sorted(seen.tolist()) == [5, 6, 6]


def test_a_split_on_disk_is_taken(tmp_path: Path, pipeline: Path) -> None:
    images(tmp_path / "set" / "train", "ab")
    images(tmp_path / "set" / "validation", "b")
    data = build(tmp_path / "set", pipeline)
    assert data.validation_captions == ("b",)
    assert len(data.train_dataloader()) == 1


def test_too_few_images_to_hold_out_are_refused(tmp_path: Path, pipeline: Path) -> None:
    with pytest.raises(DataError, match="num_validation=2 of 2 images"):
        build(images(tmp_path / "set", "ab"), pipeline, num_validation=2)


def test_a_broken_image_stops_or_is_left_out_before_training(
    tmp_path: Path, pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = images(tmp_path / "set", "aabb")
    (folder / "1.png").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"1.png cannot be decoded: its content is a web page"):
        build(folder, pipeline, num_validation=1)
    with caplog.at_level(logging.WARNING):
        data = build(folder, pipeline, num_validation=1, broken_images="skip")
    (batch,) = list(data.train_dataloader())
    assert batch["input_ids"][:, 1].tolist() == [6, 6]
    assert [r.getMessage() for r in caplog.records if "not an image: 1" in r.getMessage()] != []


def test_what_only_decoding_shows_is_found_before_training_or_the_next_stands_in(
    tmp_path: Path, pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = images(tmp_path / "set", "aab")
    Image.effect_noise((64, 64), 80).convert("RGB").save(folder / "1.png")
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:2000])
    with pytest.raises(DataError, match=r"1.png cannot be decoded"):
        build(folder, pipeline, num_validation=1, check="decode")
    with pytest.raises(DataError, match=r"1.png cannot be decoded"):  # its header is fine
        list(build(folder, pipeline, num_validation=1).train_dataloader())
    assert len(build(folder, pipeline, num_validation=1, broken_images="skip").dataset(0)) == 1
    data = build(folder, pipeline, num_validation=1, broken_images="skip", check="header")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (batch,) = list(data.train_dataloader())
            assert batch["input_ids"][:, 1].tolist() == [6, 6]
    assert len([r for r in caplog.records if "1.png" in r.getMessage()]) == 1


def test_a_folder_without_one_good_image_says_so(tmp_path: Path, pipeline: Path) -> None:
    folder = images(tmp_path / "set", "ab")
    for name in ("0.png", "1.png"):
        (folder / name).write_bytes(b"")
    with pytest.raises(DataError, match="names no usable sample"):
        build(folder, pipeline, num_validation=1, broken_images="skip")
    data = build(folder, pipeline, num_validation=1, broken_images="skip", check="none")
    with pytest.raises(DataError, match="none of 1 images can be decoded"):
        list(data.train_dataloader())


def test_images_go_to_the_class_of_their_aspect_ratio(tmp_path: Path, pipeline: Path) -> None:
    folder = images(tmp_path / "set", "abbabab")  # 6 x 4 pixels each
    for i in (1, 3, 5):
        Image.new("RGB", (4, 7), "red").save(folder / f"{i}.png")
    (folder / "3.png").write_text("broken")
    buckets = {"wide": [4, 6], "tall": [8, 4]}
    data = build(
        folder, pipeline, num_validation=1, broken_images="skip", buckets=buckets, batch_size=1
    )
    shapes = [tuple(b["image"].shape[2:]) for b in data.train_dataloader()]
    # File 0 is held out, 3 is broken.
    assert sorted(shapes) == sorted([(8, 4), (4, 6), (4, 6), (8, 4), (4, 6)])
    assert {tuple(b["image"].shape[2:]) for b in data.val_dataloader()} == {(4, 4)}
    with pytest.raises(DataError, match="cannot be decoded"):
        build(folder, pipeline, num_validation=1, buckets=buckets)

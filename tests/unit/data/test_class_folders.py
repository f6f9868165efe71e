"""Class folders: the label is the place in sorted order, on both splits the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.class_data import ClassFoldersDataModule
from lightning_dpipe.data.class_folders import class_names, list_classes
from lightning_dpipe.data.faults import Kind


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * len(name), 0, 0)).save(folder / name)
    return folder


def module(path: Path, **changes: Any) -> ClassFoldersDataModule:
    options: dict[str, Any] = {"size": 4, "num_workers": 0, "num_validation": 1, "batch_size": 9}
    data = ClassFoldersDataModule(path=path, **{**options, **changes})
    data.setup()
    return data


def test_labels_count_all_folders_in_sorted_order(tmp_path: Path) -> None:
    pictures(tmp_path, "n02/a.JPEG", "n10/b.png", "n10/deep/c.png", "stray.png")
    (tmp_path / "n05").mkdir()
    (tmp_path / ".cache").mkdir()
    classes = class_names(tmp_path)
    assert classes == ("n02", "n05", "n10")
    listing = list_classes(tmp_path, classes)
    assert [(s.path.name, s.label) for s in listing.samples] == [
        ("a.JPEG", 0), ("b.png", 2), ("c.png", 2),
    ]  # fmt: skip
    assert [f.kind for f in listing.faults] == [Kind.IGNORED, Kind.UNLISTED]
    assert "n05 has no image; label 1 is never seen" in listing.faults[0].text


def test_the_validation_split_counts_classes_as_the_training_split_does(tmp_path: Path) -> None:
    pictures(tmp_path, "train/a/1.png", "train/b/1.png", "train/c/1.png", "validation/c/1.png")
    data = module(tmp_path)
    assert [int(data.dataset(1)[0]["label"])] == [2]
    (batch,) = data.train_dataloader()
    assert sorted(batch["label"].tolist()) == [0, 1, 2]
    assert batch["image"].shape == (3, 3, 4, 4)
    assert batch["label"].dtype is torch.int64
    pictures(tmp_path, "validation/d/1.png")
    with pytest.raises(DataError, match=r"1 folders that are no class to train on, such as 'd'"):
        module(tmp_path)


def test_more_folders_than_the_model_has_classes_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path, "a/1.png", "b/1.png", "c/1.png")
    assert len(module(tmp_path, num_classes=3).dataset(0)) == 2
    with pytest.raises(DataError, match="has 3 class folders, the model 2 classes"):
        module(tmp_path, num_classes=2)


def test_a_folder_without_folders_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no folders"):
        module(pictures(tmp_path, "a.png"))

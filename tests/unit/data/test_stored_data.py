"""Which samples are trained on is decided by rank 0, once, for all ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.class_data import ClassFoldersDataModule


class OneOfTwo:
    """What a datamodule sees of a trainer; both ranks share `box`, as a broadcast would."""

    world_size = 2

    def __init__(self, rank: int, box: list[Any]) -> None:
        self.is_global_zero = rank == 0
        self.strategy = self
        self._box = box

    def broadcast(self, value: Any, src: int = 0) -> Any:
        if self.is_global_zero:
            self._box.append(value)
        return self._box[-1]


def rank(path: Path, number: int, box: list[Any], **changes: Any) -> ClassFoldersDataModule:
    options: dict[str, Any] = {"size": 4, "num_workers": 0, "num_validation": 1, "batch_size": 2}
    data = ClassFoldersDataModule(path=path, **{**options, **changes})
    data.trainer = OneOfTwo(number, box)  # type: ignore[assignment]
    data.setup()
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(8):
        (tmp_path / "set" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "set" / "a" / f"{i}.png")
    return tmp_path / "set"


def test_a_file_that_only_one_rank_cannot_read_changes_no_ranks_samples(folder: Path) -> None:
    box: list[Any] = []
    (folder / "a" / "3.png").write_bytes(b"")
    first = rank(folder, 0, box, broken_images="skip")
    shutil.rmtree(folder)  # as if the second rank saw no file at all
    second = rank(folder, 1, box, broken_images="skip")
    for split in (0, 1):
        assert first.dataset(split).samples == second.dataset(split).samples
    assert [s.path.name for s in first.dataset(0).samples] == [
        f"{i}.png" for i in (1, 2, 4, 5, 6, 7)
    ]


def test_what_rank_0_refuses_is_refused_on_every_rank(folder: Path) -> None:
    (folder / "a" / "3.png").write_bytes(b"")
    box: list[Any] = []
    for number in (0, 1):
        with pytest.raises(DataError, match=r"3\.png cannot be decoded: it is empty"):
            rank(folder, number, box)


def test_too_few_samples_for_all_ranks_are_refused_in_setup(folder: Path) -> None:
    """7 to train on: enough for one rank of 4, not for two."""
    box: list[Any] = []
    for number in (0, 1):
        with pytest.raises(DataError, match=r"7 samples .* one global batch of 4 x 2 ranks = 8"):
            rank(folder, number, box, drop_last=True, batch_size=4)
    alone = ClassFoldersDataModule(
        path=folder, size=4, num_workers=0, num_validation=1, drop_last=True, batch_size=4
    )
    alone.setup()
    assert len(alone.train_dataloader()) == 1

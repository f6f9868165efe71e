"""The doctor finds what was planted and nothing else, and training does as it said."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.circles import CirclesDataModule
from lightning_dpipe.data.doctor import Report, examine
from lightning_dpipe.data.faults import Kind, Verdict
from lightning_dpipe.data.image_folder import ImageFolderDataModule
from lightning_dpipe.data.inventory import Told
from saved import save_tokenizer

SIDE = 64
Planted = set[tuple[Kind, str]]


def picture(mode: str = "RGB", size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    noise = Image.effect_noise(size, 60)
    return Image.merge("RGB", (noise, noise.rotate(90), noise.rotate(180))).convert(mode)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def deep() -> Image.Image:
    return Image.fromarray(np.full((SIDE, SIDE), 9999, np.uint16))


def cut(path: Path) -> None:
    picture().save(path)
    path.write_bytes(path.read_bytes()[:-200])


def animated(path: Path) -> None:
    picture().save(path, save_all=True, append_images=[picture("L").convert("RGB")])


IMAGE_FAULTS: dict[str, tuple[Kind, Callable[[Path], Any]]] = {
    "cut.jpg": (Kind.DAMAGED, cut),
    "cut.png": (Kind.DAMAGED, cut),
    "empty.jpg": (Kind.EMPTY_FILE, lambda p: p.write_bytes(b"")),
    "page.jpg": (Kind.NOT_AN_IMAGE, lambda p: p.write_bytes(b"<!doctype html><p>gone")),
    "text.png": (Kind.NOT_AN_IMAGE, lambda p: p.write_bytes(b"hello")),
    "float.tif": (Kind.NO_RANGE, lambda p: Image.new("F", (SIDE, SIDE), 0.5).save(p)),
    "deep.png": (Kind.DEEP, lambda p: deep().save(p)),
    "inks.jpg": (Kind.INKS, lambda p: picture("CMYK").save(p)),
    "clear.png": (Kind.TRANSPARENT, lambda p: picture("RGBA").save(p)),
    "grey-clear.png": (Kind.TRANSPARENT, lambda p: picture("LA").save(p)),
    "palette.png": (Kind.TRANSPARENT, lambda p: picture("P").save(p, transparency=3)),
    "turned.jpg": (Kind.TURNED, lambda p: picture().save(p, exif=turned())),
    "moving.webp": (Kind.ANIMATED, animated),
    "dot.png": (Kind.SMALL, lambda p: picture(size=(1, 1)).save(p)),
    "thread.png": (Kind.CROPPED, lambda p: picture(size=(20000, SIDE)).save(p)),
    "LOUD.JPG": (Kind.TURNED, lambda p: picture().save(p, exif=turned())),
}  # fmt: skip


def plant(folder: Path, num_files: int = 200) -> Planted:
    """A folder of images with text files beside them, `num_files` in all, every fault once."""
    folder.mkdir()
    planted: Planted = set()
    for name, (kind, write) in IMAGE_FAULTS.items():
        write(folder / name)
        (folder / name).with_suffix(".txt").write_text("a")
        planted.add((kind, name))
    (folder / "cut.txt").write_text("a")  # cut.jpg and cut.png share it
    planted.add((Kind.TWINS, "cut.txt"))
    for name in ("silent", "blank", "latin", "long"):
        picture().save(folder / f"{name}.jpg")
    (folder / "blank.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("größe".encode("latin-1"))
    (folder / "long.txt").write_text("a " * 300)
    planted |= {(Kind.NO_CAPTION, "silent.jpg"), (Kind.NO_CAPTION, "blank.jpg")}
    planted |= {(Kind.ENCODING, "latin.txt"), (Kind.CAPTION_CUT, "long.jpg")}
    (folder / "metadata.json1").write_text("{}")
    planted.add((Kind.IGNORED, "metadata.json1"))
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "loop.txt").write_text("a")
    planted.add((Kind.DAMAGED, "loop.png"))
    good = 0
    while len(list(folder.iterdir())) < num_files:
        picture().save(folder / f"good {good}, größe=1.jpg")
        (folder / f"good {good}, größe=1.txt").write_text("b")
        good += 1
    return planted


def module(path: Path, **changes: Any) -> ImageFolderDataModule:
    options: dict[str, Any] = {
        "tokenizer": str(path.parent / "pipeline"), "size": SIDE, "num_tokens": 8, "batch_size": 4,
        "num_validation": 2, "num_workers": 0,
    }  # fmt: skip
    if not (path.parent / "pipeline").exists():
        save_tokenizer(path.parent / "pipeline" / "tokenizer")
    return ImageFolderDataModule(path=path, **{**options, **changes})


def report_of(data: Any, num_ranks: int = 2, **options: Any) -> Report:
    return examine(
        data, num_ranks=num_ranks, progress=lambda part: lambda done, total: None, **options
    )


def found(report: Report) -> Planted:
    return {(fault.kind, Path(fault.where).name) for fault in report.faults}


def test_every_planted_fault_of_200_files_is_found_and_nothing_else(tmp_path: Path) -> None:
    planted = plant(tmp_path / "set")
    assert len(list((tmp_path / "set").iterdir())) in (200, 201)
    before = {p.name: p.lstat().st_mtime_ns for p in (tmp_path / "set").iterdir()}
    report = report_of(module(tmp_path / "set"))
    assert found(report) == planted
    assert {p.name: p.lstat().st_mtime_ns for p in (tmp_path / "set").iterdir()} == before
    refused = {f.kind for f in report.faults if f.verdict is Verdict.REFUSED}
    assert refused == {
        Kind.DAMAGED, Kind.EMPTY_FILE, Kind.NOT_AN_IMAGE, Kind.NO_RANGE, Kind.NO_CAPTION,
        Kind.ENCODING,
    }  # fmt: skip
    assert report.reasons == ("10 faults that training refuses, listed under their kinds",)
    with pytest.raises(DataError, match="more such faults"):
        module(tmp_path / "set").setup()


@pytest.mark.parametrize(("missing", "extra"), [("skip", 0), ("empty", 3)])
def test_training_uses_the_samples_that_the_doctor_counted(
    tmp_path: Path, missing: str, extra: int
) -> None:
    plant(tmp_path / "set", 120)
    data = module(tmp_path / "set", broken_images="skip", missing_captions=missing)
    report = report_of(data)
    assert report.reasons == ()
    data.setup()
    assert (len(data.dataset(0)), len(data.dataset(1))) == (report.num_train, report.num_validation)
    loader = data.train_dataloader()
    batches = list(loader)
    assert sum(len(b["image"]) for b in batches) == report.num_train
    assert report_of(data, num_ranks=1).num_steps == len(batches)
    bad = {Kind.DAMAGED: 3, Kind.EMPTY_FILE: 1, Kind.NOT_AN_IMAGE: 2, Kind.NO_RANGE: 1}
    num_images = sum(p.suffix.lower() != ".txt" for p in (tmp_path / "set").iterdir()) - 1
    assert report.num_train + 2 == num_images - sum(bad.values()) - 3 + extra


HINTS: dict[str, tuple[Kind | None, Callable[[Path], Any]]] = {
    "good": (None, lambda p: picture().save(p)),
    "one-channel": (None, lambda p: picture("L").save(p)),
    "half-size": (None, lambda p: picture(size=(SIDE // 2, SIDE // 2)).save(p)),
    "four-channels": (Kind.TRANSPARENT, lambda p: picture("RGBA").save(p)),
    "other-shape": (Kind.HINT_SHAPE, lambda p: picture(size=(SIDE, 2 * SIDE)).save(p)),
    "cut": (Kind.DAMAGED, cut),
    "gone": (Kind.HINT_ABSENT, lambda p: None),
}


def triples(folder: Path, swap: bool = False) -> Planted:
    """ControlNet triples, one for each entry of `HINTS`, and some more good ones."""
    folder.mkdir()
    rows, planted = [], set()
    for number, (name, (kind, write)) in enumerate(
        [*HINTS.items(), *[("good", HINTS["good"])] * 4]
    ):
        image, hint = f"{number}.png", f"{number}-{name}.png"
        picture().save(folder / image)
        write(folder / hint)
        rows.append({"file_name": image, "text": "a", "hint": hint})
        if kind is not None:
            planted.add((kind, f"metadata.jsonl:{number + 1}" if name == "gone" else hint))
            if kind is Kind.HINT_ABSENT:
                continue
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return planted


def test_hints_that_cannot_go_with_their_images_are_found(tmp_path: Path) -> None:
    planted = triples(tmp_path / "set")
    report = report_of(module(tmp_path / "set", hint_column="hint"))
    assert found(report) == planted
    assert report.reasons[0].startswith("3 faults that training refuses")
    data = module(tmp_path / "set", hint_column="hint", broken_images="skip")
    data.setup()
    samples = [data.dataset(split)[i] for split in (0, 1) for i in range(len(data.dataset(split)))]
    assert len(samples) == len(HINTS) + 4 - 3
    assert {(s["hint"].shape, s["image"].shape) for s in samples} == {((3, SIDE, SIDE),) * 2}
    assert all(s["hint"].min() >= 0 and s["hint"].max() <= 1 for s in samples)


@pytest.mark.parametrize("swapped", [False, True])
def test_swapped_columns_are_suspected_from_the_colours(tmp_path: Path, swapped: bool) -> None:
    (tmp_path / "set").mkdir()
    rows = []
    for i in range(6):
        picture().save(tmp_path / "set" / f"{i}.png")
        picture("L").save(tmp_path / "set" / f"{i}h.png")
        names = (f"{i}h.png", f"{i}.png") if swapped else (f"{i}.png", f"{i}h.png")
        rows.append({"file_name": names[0], "text": "a", "hint": names[1]})
    (tmp_path / "set" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = report_of(module(tmp_path / "set", hint_column="hint"))
    assert [f.kind for f in report.faults] == [Kind.SWAPPED] * swapped
    assert report.reasons == ()


def goods(folder: Path, count: int, size: tuple[int, int] = (SIDE, SIDE)) -> Path:
    folder.mkdir(exist_ok=True)
    for i in range(count):
        name = f"{size[0]}-{i}"
        picture(size=size).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a")
    return folder


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 17])
def test_counts_around_the_global_batch(tmp_path: Path, count: int, drop_last: bool) -> None:
    """Global batch 4 x 2 = 8, two more images held out."""
    data = module(goods(tmp_path / "set", count + 2), drop_last=drop_last)
    report = report_of(data)
    assert (report.num_train, report.num_validation) == (count, 2)
    if drop_last and count < 8:
        (reason,) = report.reasons
        assert (
            f"{count} samples to train on, fewer than one global batch of 4 x 2 ranks = 8" in reason
        )
        assert "drop_last=false" in reason
        return
    assert report.reasons == ()
    (tally,) = report.tally
    assert tally.num_dropped == (count % 8 if drop_last else 0)
    assert tally.num_repeated == (0 if drop_last else count % 2)
    assert report.num_steps == (count // 8 if drop_last else -(-count // 8))
    assert bool(report.notes) == (count < 8)


def test_none_and_one_image_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert "has 0 images" in report_of(module(tmp_path / "none")).reasons[0]
    (reason,) = report_of(module(goods(tmp_path / "one", 1), num_validation=1)).reasons
    assert "num_validation=1 of 1 images" in reason


def test_classes_of_shapes_are_counted_by_hand(tmp_path: Path) -> None:
    goods(tmp_path / "set", 13)
    goods(tmp_path / "set", 6, (2 * SIDE, SIDE))  # width, height
    data = module(
        tmp_path / "set", buckets={"wide": [32, 64], "tall": [64, 32]}, drop_last=True, batch_size=2
    )
    report = report_of(data, num_ranks=2)
    held_out = 2  # files 0 (128-0) and 9 (64-3)
    rows = {t.name: (t.num_samples, t.num_batches, t.num_dropped) for t in report.tally}
    assert rows == {"base": (12, 3, 0), "wide": (5, 1, 1), "tall": (0, 0, 0)}
    assert report.num_train == 13 + 6 - held_out
    assert report.num_steps == 4


def test_what_is_not_made_of_files_is_counted_all_the_same() -> None:
    report = report_of(CirclesDataModule(batch_size=8, size=8, num_samples=100), num_ranks=3)
    (tally,) = report.tally
    assert (tally.num_samples, tally.num_batches, tally.num_repeated) == (100, 5, 2)
    assert "not made of files" in report.notes[0]


def test_captions_need_a_tokenizer_only_where_a_model_is_to_train(tmp_path: Path) -> None:
    data = module(goods(tmp_path / "set", 12), tokenizer=None)
    assert "no tokenizer" in report_of(data).reasons[0]
    report = report_of(data, needs_tokenizer=False)
    assert report.reasons == ()
    assert "no tokenizer" in report.notes[0]
    with pytest.raises(DataError, match="captions need a tokenizer"):
        data.setup()


def test_progress_is_told_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Told("looking at train", tell=told.append)
    for done in range(1, 11):
        now[0] += 0.7
        progress(done, 10)
    assert told == [f"looking at train: {n} of 10 files ({n * 10}%)" for n in (3, 6, 9)]

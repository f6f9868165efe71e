"""`dpipe doctor`: what it prints, its exit code, and that both are what training would do."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.data.circles_folder import write_circles


@pytest.fixture
def circles(tmp_path: Path) -> Path:
    write_circles(tmp_path / "a set, größe=1", num=20, size=16)
    return tmp_path / "a set, größe=1"


def doctor(path: Path, *more: str) -> int:
    where = f"data.path='{path}'"
    return main(["doctor", "data=image_folder", where, "data.size=16", "trainer.devices=2", *more])


def result(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


def test_a_good_set_passes_with_its_arithmetic(
    circles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(circles, "data.batch_size=3", "--json", "data.num_validation=4") == 0
    text, told = result(capsys)
    assert "16 to train on, 4 held out" in text
    assert "3 per device x 2 ranks = 6 samples per step, 3 steps per epoch" in text
    assert "16 = 2 x 6 + 4" in text
    assert "training would run" in text
    assert not told["refused"]
    assert (told["global_batch"], told["steps_per_epoch"], told["train"]) == (6, 3, 16)
    assert [f["kind"] for f in told["faults"]] == ["unlisted"]  # the hints, which nobody asked for
    assert told["faults"][0]["count"] == 20


def test_a_fault_is_shown_with_its_file_and_training_refuses(
    circles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(5):
        (circles / "images" / f"0000{i}.png").write_bytes(b"")
    options = ("data.hint_column=conditioning_image", "data.num_validation=4")
    assert doctor(circles, *options, "--json") == 1
    text, told = result(capsys)
    assert "5 x empty file (training refuses)" in text
    assert "and 2 more (--all names them)" in text
    assert "training would refuse: 5 faults" in text
    assert [len(f["faults"]) for f in told["faults"]] == [5]
    assert doctor(circles, *options, "data.broken_images=skip", "--all") == 0
    text = capsys.readouterr().out
    assert "5 x empty file (left out)" in text
    assert all(f"0000{i}.png cannot be decoded: it is empty" in text for i in range(5))
    assert "11 to train on, 4 held out" in text


def test_fewer_images_than_a_global_batch_is_one_message(
    circles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(circles, "data.drop_last=true", "data.num_validation=4", "batch_size=10") == 1
    text = capsys.readouterr().out
    assert (
        text.count("16 samples to train on, fewer than one global batch of 10 x 2 ranks = 20") == 2
    )
    assert "training would refuse" in text


def test_recipes_and_data_in_memory_are_counted_without_building_the_model(
    circles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "recipe=sd21", "trainer.devices=8", "--json"]) == 0
    _, told = result(capsys)
    assert (told["global_batch"], told["train"]) == (256, 2000)
    path = f"data.path='{circles}'"
    assert main(["doctor", "recipe=controlnet", "data=image_folder", path, "--json"]) == 1
    text, told = result(capsys)
    assert "no tokenizer is given" in told["reasons"][0]
    assert told["classes"][0]["sides"] == [512, 512]
    assert "20 x smaller than the training size (trained on)" in text


def test_no_path_and_no_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "data=image_folder"]) == 2
    assert "data.path is nothing; give the one folder" in capsys.readouterr().err
    assert doctor(tmp_path / "gone") == 1
    assert "gone is not a folder" in capsys.readouterr().out
    assert main(["doctor"]) == 2
    assert "nothing chooses the data" in capsys.readouterr().err


def test_other_layouts_are_examined_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(6):
        path = tmp_path / "set" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (256, 256)).save(path)
    command = ["doctor", f"data.path={tmp_path / 'set'}", "data.num_validation=2", "--json"]
    assert main([*command, "data=class_folders"]) == 0
    _, told = result(capsys)
    assert (told["train"], told["faults"]) == (4, [])
    assert main([*command, "data=class_folders", "data.num_classes=1"]) == 1
    assert "has 2 class folders, the model 1" in result(capsys)[1]["reasons"][0]
    for kind in ("shards", "latents"):
        assert main([*command, f"data={kind}"]) == 1
        assert str(tmp_path / "set") in result(capsys)[1]["reasons"][0]

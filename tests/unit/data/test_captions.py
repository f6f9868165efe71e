"""Captioned folders: which image has which caption, or a named error."""

import json
from pathlib import Path

import pytest
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.captions import Columns, Missing, read_captions


def write_index(folder: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metadata.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder


def picture(path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (2, 2)).save(path)
    return path.name


def test_lines_are_read_in_file_order_with_the_named_columns(tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        picture(tmp_path / name)
    write_index(
        tmp_path, {"file": "b.png", "caption": "zwei"}, "", {"file": "a.png", "caption": "één"}
    )
    images = read_captions(tmp_path, columns=Columns(file="file", caption="caption"))
    assert [(i.path.name, i.caption) for i in images] == [("b.png", "zwei"), ("a.png", "één")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "names no image with a caption"),
        (["{"], r"metadata.jsonl:1 is not JSON"),
        (["[]"], "keys found: none"),
        ([{"file_name": "a.png", "caption": "x"}], "'text'; keys found: caption, file_name"),
        ([{"file_name": "a.png", "text": 3}], "no text under 'text'"),
        ([{"file_name": "gone.png", "text": "x"}], r"gone.png, which does not exist"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_captions(write_index(tmp_path, *lines))


def test_a_missing_index_is_named_with_an_example(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 0 images.*one JSON line per image"):
        read_captions(tmp_path)


def test_a_table_of_commas_is_read_too(tmp_path: Path) -> None:
    for name in ("a.png", "h.png"):
        picture(tmp_path / name)
    (tmp_path / "metadata.csv").write_text(
        'file_name,text,hint\na.png,"a cat, asleep",h.png\n', encoding="utf-8-sig"
    )
    (image,) = read_captions(tmp_path, columns=Columns(hint="hint"))
    assert (image.caption, image.hint) == ("a cat, asleep", tmp_path / "h.png")
    with pytest.raises(DataError, match=r"no text under 'outline'; keys found: file_name, hint"):
        read_captions(tmp_path, columns=Columns(hint="outline"))


def test_text_files_beside_the_images_are_captions(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG", "c.png"):
        picture(tmp_path / "sub" / name)
    (tmp_path / "sub" / "a.txt").write_text(" a cat\n")
    (tmp_path / "sub" / "b.txt").write_text("a dog")
    (tmp_path / "sub" / "c.txt").write_text("  \n")
    with pytest.raises(DataError, match=r"c.png has no caption; add one, or choose"):
        read_captions(tmp_path)
    kept = read_captions(tmp_path, missing=Missing.SKIP)
    assert [(i.path.name, i.caption) for i in kept] == [("a.JPG", "a cat"), ("b.png", "a dog")]
    assert [i.caption for i in read_captions(tmp_path, missing=Missing.EMPTY)][2] == ""


def test_a_null_caption_is_a_missing_one(tmp_path: Path) -> None:
    write_index(tmp_path, {"file_name": picture(tmp_path / "a.png"), "text": None})
    with pytest.raises(DataError, match=r"metadata.jsonl:1 has no caption"):
        read_captions(tmp_path)
    with pytest.raises(DataError, match="names no image with a caption"):
        read_captions(tmp_path, missing=Missing.SKIP)

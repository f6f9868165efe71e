"""What a captioned folder lists, and every fault it can have, without one hiding another."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data import tables
from lightning_dpipe.data.captions import Columns, list_captions, read_captions
from lightning_dpipe.data.faults import Broken, Kind, Missing, Policy, Verdict
from lightning_dpipe.data.samples import Listing
from lightning_dpipe.data.walk import files_under

SKIP = Policy(missing=Missing.SKIP, broken=Broken.SKIP)


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(folder / name)
    return folder


def index(folder: Path, *rows: Any, name: str = "metadata.jsonl") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


def row(name: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"file_name": name, "text": text, **more}


def kinds(listing: Listing) -> list[tuple[Kind, Verdict]]:
    return [(fault.kind, fault.verdict) for fault in listing.faults]


def test_all_faults_of_an_index_are_found_at_once(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png", "d.png", "extra.png", "sub/e.png")
    index(
        tmp_path, row("a.png", "x"), "{oops", row("gone.png", "x"), row("b.png", ""),
        row("c.png", 3), row("a.png", "again"), {"text": "no file"}, row("e.png", "x"),
        row("d.png", None),
    )  # fmt: skip
    (tmp_path / "metadata.json1").write_text("")
    listing = list_captions(tmp_path, policy=SKIP)
    assert [(s.path.name, s.caption) for s in listing.samples] == [
        ("a.png", "x"),
        ("a.png", "again"),
    ]
    assert kinds(listing) == [
        (Kind.IGNORED, Verdict.SKIPPED),  # metadata.json1
        (Kind.LINE, Verdict.REFUSED),  # {oops
        (Kind.ABSENT, Verdict.SKIPPED),
        (Kind.NO_CAPTION, Verdict.SKIPPED),
        (Kind.LINE, Verdict.REFUSED),  # 3 is no caption
        (Kind.REPEATED, Verdict.USED),
        (Kind.LINE, Verdict.REFUSED),  # no file
        (Kind.ABSENT, Verdict.SKIPPED),
        (Kind.NO_CAPTION, Verdict.SKIPPED),
        (Kind.UNLISTED, Verdict.SKIPPED),  # c.png, whose line is unusable
        (Kind.UNLISTED, Verdict.SKIPPED),  # extra.png
        (Kind.UNLISTED, Verdict.SKIPPED),  # sub/e.png
    ]
    index(tmp_path, row("a.png", "x"), "{oops", row("c.png", 3), {"text": "no file"})
    with pytest.raises(DataError, match=r"jsonl:2 is not JSON.* \(2 more such faults: `dpipe doc"):
        read_captions(tmp_path)


def test_a_path_that_starts_at_another_folder_is_told_where_it_is(tmp_path: Path) -> None:
    split = pictures(tmp_path, "train/a.png") / "train"
    (fault, _) = list_captions(index(split, row("train/a.png", "x"))).faults
    assert fault.kind is Kind.ABSENT
    assert f"({split / 'a.png'} does: paths are relative to the index)" in fault.text


def test_a_column_that_only_some_rows_have_is_a_missing_caption(tmp_path: Path) -> None:
    index(pictures(tmp_path, "a.png", "b.png"), row("a.png", "x"), {"file_name": "b.png"})
    assert kinds(list_captions(tmp_path)) == [(Kind.NO_CAPTION, Verdict.REFUSED)]
    listing = list_captions(tmp_path, policy=Policy(missing=Missing.EMPTY))
    assert [s.caption for s in listing.samples] == ["x", ""]
    assert kinds(listing) == [(Kind.NO_CAPTION, Verdict.USED)]


def test_a_list_of_captions_keeps_those_that_say_something(tmp_path: Path) -> None:
    index(
        pictures(tmp_path, "a.png", "b.png"), row("a.png", ["x", " ", None, "y "]), row("b.png", [])
    )
    listing = list_captions(tmp_path, policy=SKIP)
    assert [s.captions for s in listing.samples] == [("x", "y")]
    assert kinds(listing)[0] == (Kind.NO_CAPTION, Verdict.SKIPPED)


@pytest.mark.parametrize(
    ("data", "caption"),
    [
        (b"\xef\xbb\xbfa cat\r\nasleep\r\n", "a cat\nasleep"),  # byte order mark, CRLF
        ("größe 猫 🦊".encode(), "größe 猫 🦊"),
        (b"a, b=c; 'd'", "a, b=c; 'd'"),
        (b"word " * 300, ("word " * 300).strip()),
    ],
)
def test_text_files_as_other_programs_write_them(tmp_path: Path, data: bytes, caption: str) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "a.txt").write_bytes(data)
    assert [s.caption for s in list_captions(tmp_path).samples] == [caption]


@pytest.mark.parametrize(
    ("missing", "captions", "verdict"),
    [
        (Missing.ERROR, ["ok"], Verdict.REFUSED),
        (Missing.SKIP, ["ok"], Verdict.SKIPPED),
        (Missing.EMPTY, ["", "ok"], Verdict.USED),
    ],
)
def test_latin_1_is_not_guessed(
    tmp_path: Path, missing: Missing, captions: list[str], verdict: Verdict
) -> None:
    pictures(tmp_path, "a.png", "b.png")
    (tmp_path / "a.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / "b.txt").write_text("ok")
    listing = list_captions(tmp_path, policy=Policy(missing=missing))
    assert [s.caption for s in listing.samples] == captions
    assert kinds(listing) == [(Kind.ENCODING, verdict)]
    assert "a.txt is not UTF-8" in listing.faults[0].text


NAMES = ["with space.png", "comma, and=sign.png", "größe 猫.png", "SHOUT.JPG", "two.dots.png"]


@pytest.mark.parametrize("kind", ["index", "beside"])
def test_names_may_hold_anything(tmp_path: Path, kind: str) -> None:
    pictures(tmp_path, *NAMES)
    if kind == "index":
        index(tmp_path, *[row(name, name) for name in NAMES])
    else:
        for name in NAMES:
            (tmp_path / name).with_suffix(".txt").write_text(name)
    listing = list_captions(tmp_path)
    assert listing.faults == ()
    assert {s.path.name: s.caption for s in listing.samples} == {name: name for name in NAMES}


def test_two_images_of_one_stem_share_their_caption_and_it_is_told(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "a.jpg", "b.png")
    for stem in "ab":
        (tmp_path / f"{stem}.txt").write_text(stem)
    listing = list_captions(tmp_path)
    assert [(s.path.name, s.caption) for s in listing.samples] == [
        ("a.jpg", "a"), ("a.png", "a"), ("b.png", "b"),
    ]  # fmt: skip
    assert kinds(listing) == [(Kind.TWINS, Verdict.USED)]
    assert "a.jpg, a.png share" in listing.faults[0].text


def test_a_circle_of_links_ends_and_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    pictures(tmp_path / "set", "a.png", "sub/b.png")
    pictures(tmp_path / "elsewhere", "c.png")
    (tmp_path / "set" / "sub" / "up").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "self.png").symlink_to("self.png")
    (tmp_path / "set" / "._a.png").write_bytes(b"\0")
    found = [p.relative_to(tmp_path / "set").as_posix() for p in files_under(tmp_path / "set")]
    assert found == ["a.png", "again/c.png", "self.png", "sub/b.png"]


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        list_captions(tmp_path / "nowhere")


def test_an_index_by_another_name_is_pointed_at(tmp_path: Path) -> None:
    index(pictures(tmp_path, "a.png"), row("a.png", "x"), name="metadata.json1")
    with pytest.raises(DataError, match=r"it has .*metadata\.json1, which is none of these"):
        list_captions(tmp_path)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("gone.png", Kind.HINT_ABSENT), (None, Kind.HINT_ABSENT), ("", Kind.HINT_ABSENT)],
)
def test_a_sample_without_its_hint_is_left_out_or_refused(
    tmp_path: Path, value: str | None, kind: Kind
) -> None:
    pictures(tmp_path, "a.png", "b.png", "h.png")
    index(tmp_path, row("a.png", "x", hint="h.png"), row("b.png", "x", hint=value))
    columns = Columns(hint="hint")
    assert (kind, Verdict.REFUSED) in kinds(list_captions(tmp_path, columns=columns))
    listing = list_captions(tmp_path, columns=columns, policy=SKIP)
    assert [s.path.name for s in listing.samples] == ["a.png"]
    assert kinds(listing) == [(kind, Verdict.SKIPPED)]


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def test_parquet_says_the_same_as_lines_of_json(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "c.png", "d.png"]
    texts = [["one", "two"], ["three"], None, []]
    columns = {"file_name": names, "text": texts, "hint": ["h.png"] * 4}
    read = []
    for form in ("parquet", "jsonl"):
        folder = pictures(tmp_path / form, *names, "h.png")
        if form == "parquet":
            write_parquet(folder / "metadata.parquet", columns)
        else:
            rows = [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
            index(folder, *rows)
        listing = list_captions(folder, columns=Columns(hint="hint"), policy=SKIP)
        read.append([(s.path.name, s.captions, s.hint is not None) for s in listing.samples])
    assert read[0] == read[1] == [("a.png", ("one", "two"), True), ("b.png", ("three",), True)]


def test_parquet_without_its_package_and_a_broken_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures(tmp_path, "a.png")
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"metadata\.parquet cannot be read as Parquet"):
        list_captions(tmp_path)
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'lightning-dpipe\[parquet\]'"):
        list_captions(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_read_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = index(pictures(tmp_path / "set", "a.png", "b.png"), row("a.png", "x"))
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}
    for path in (folder, *before):
        os.chmod(path, 0o555)
    try:
        assert len(list_captions(folder).samples) == 1
    finally:
        os.chmod(folder, 0o755)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")} == before

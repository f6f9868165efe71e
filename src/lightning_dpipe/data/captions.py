"""Captioned folders: which image has which caption, and which hint.

In:     a folder that says so in ``metadata.jsonl`` or ``metadata.csv`` (Hugging Face's imagefolder
        layout), or in a text file beside each image (``0001.png``, ``0001.txt``).
Out:    `CaptionedImage`s, in file order. Nothing is written into the folder.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lightning_dpipe.core.errors import DataError

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))


class Missing(str, Enum):
    """What becomes of an image without a caption."""

    ERROR = "error"
    SKIP = "skip"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Keys of the index: image path and caption, and, for ControlNet, the hint's path."""

    file: str = "file_name"
    caption: str = "text"
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedImage:
    """One image, its caption, and the hint image if there is one."""

    path: Path
    caption: str
    hint: Path | None = None


def read_captions(
    folder: Path, *, columns: Columns | None = None, missing: Missing = Missing.ERROR
) -> tuple[CaptionedImage, ...]:
    """Read a folder's index, or the text files beside its images.

    Args:
        folder: Holds the images; paths in the index are relative to it.
        columns: Names of the index' columns.
        missing: What becomes of an image whose caption is absent or blank.

    Raises:
        DataError: There is no index and no caption, a line is unusable (the message lists the keys
            found), an image does not exist, or a caption is missing and `missing` is ``error``.
    """
    columns = Columns() if columns is None else columns
    index = next(
        (p for p in (folder / "metadata.jsonl", folder / "metadata.csv") if p.is_file()), None
    )
    if index is not None:
        found = list(_indexed(index, columns, missing))
    else:
        found = list(_beside(folder, missing))
    if not found:
        raise DataError(f"{index or folder} names no image with a caption; expected at least one")
    return tuple(found)


def _indexed(index: Path, columns: Columns, missing: Missing) -> Iterator[CaptionedImage]:
    rows = _json_rows(index) if index.suffix == ".jsonl" else _csv_rows(index)
    for number, row in rows:
        where = f"{index}:{number}"
        name, caption = _text(where, row, columns.file), row.get(columns.caption)
        if columns.caption not in row or not isinstance(caption, str | None):
            raise DataError(_no_text(where, row, columns.caption))
        path = _existing(where, index.parent / name)
        kept = _caption(where, caption, missing)
        if kept is None:
            continue
        hint = None
        if columns.hint is not None:
            hint = _existing(where, index.parent / _text(where, row, columns.hint))
        yield CaptionedImage(path=path, caption=kept, hint=hint)


def _json_rows(index: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(index.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{index}:{number} is not JSON: {error}") from error
        yield number, row if isinstance(row, dict) else {}


def _csv_rows(index: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with index.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            yield reader.line_num, {k: v for k, v in row.items() if k is not None}


def _beside(folder: Path, missing: Missing) -> Iterator[CaptionedImage]:
    images = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not any(p.with_suffix(".txt").is_file() for p in images):
        raise DataError(
            f"{folder} has {len(images)} images, no metadata.jsonl or metadata.csv, and no .txt "
            "beside an image; give one JSON line per image, such as "
            '{"file_name": "0001.png", "text": "a red square"}'
        )
    for path in images:
        text = path.with_suffix(".txt")
        caption = text.read_text(encoding="utf-8") if text.is_file() else None
        kept = _caption(str(path), caption, missing)
        if kept is not None:
            yield CaptionedImage(path=path, caption=kept)


def _caption(where: str, caption: str | None, missing: Missing) -> str | None:
    """The caption to train on; None skips the image."""
    text = "" if caption is None else caption.strip()
    if text or missing is Missing.EMPTY:
        return text
    if missing is Missing.SKIP:
        return None
    raise DataError(
        f"{where} has no caption; add one, or choose missing_captions=skip (leave the image out) "
        "or missing_captions=empty (train it on the empty caption)"
    )


def _text(where: str, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise DataError(_no_text(where, row, column))
    return value


def _no_text(where: str, row: Mapping[str, Any], column: str) -> str:
    return (
        f"{where} has no text under {column!r}; keys found: {', '.join(sorted(row)) or 'none'}; "
        "name the right ones with file_column=, caption_column= and hint_column="
    )


def _existing(where: str, path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"{where} names {path}, which does not exist")
    return path

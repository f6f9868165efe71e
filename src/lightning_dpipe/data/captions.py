"""Captioned folders: which image has which captions, and which hint.

In:     a folder that says so in ``metadata.jsonl``, ``metadata.csv`` or ``metadata.parquet``
        (Hugging Face's imagefolder layout), or in a text file beside each image (``0001.png``,
        ``0001.txt``). A caption in an index may be a list of captions.
Out:    `Sample`s, in file order. Nothing is written into the folder.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.faults import (
    Fault,
    FaultError,
    Kind,
    Missing,
    Policy,
    Verdict,
    settled,
)
from lightning_dpipe.data.samples import Listing, Sample
from lightning_dpipe.data.tables import Row, index_of, near_misses, rows_of
from lightning_dpipe.data.walk import IMAGES, files_under


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Keys of the index: image path and caption, and, for ControlNet, the hint's path."""

    file: str = "file_name"
    caption: str = "text"
    hint: str | None = None


def read_captions(
    folder: Path, *, columns: Columns | None = None, missing: Missing = Missing.ERROR
) -> tuple[Sample, ...]:
    """Read a folder's index, or the text files beside its images; see `list_captions`.

    Raises:
        DataError: There is no index and no caption, a line is unusable (the message lists the keys
            found), an image does not exist, or a caption is missing and `missing` is ``error``.
    """
    listing = list_captions(folder, columns=columns, policy=Policy(missing=missing))
    settled(listing.faults)
    if not listing.samples:
        raise DataError(f"{listing.where} names no image with a caption; expected at least one")
    return listing.samples


def list_captions(
    folder: Path,
    *,
    columns: Columns | None = None,
    policy: Policy | None = None,
    suffixes: Collection[str] = IMAGES,
) -> Listing:
    """Read a folder's index, or the text files beside its images.

    Args:
        folder: Holds the images; paths in the index are relative to it.
        columns: Names of the index' columns.
        policy: What becomes of what cannot be used.
        suffixes: Of the files, in lower case.

    Raises:
        DataError: There is no index and no caption, or the index cannot be read at all.
    """
    files = files_under(folder, suffixes)
    reader = _Reader(columns or Columns(), policy or Policy(), {}, [])
    for path in near_misses(folder):
        reader.fault(
            Kind.IGNORED, str(path), f"{path} is not read as an index; the names that are: "
            "metadata.jsonl, metadata.csv, metadata.parquet, the first that exists",
        )  # fmt: skip
    index = index_of(folder)
    if index is not None:
        return reader.indexed(index, files)
    return reader.beside(folder, files)


@dataclass(frozen=True, slots=True)
class _Reader:
    columns: Columns
    policy: Policy
    listed: dict[Path, str]
    faults: list[Fault] = field(default_factory=list)

    def fault(self, kind: Kind, where: str, text: str) -> Verdict:
        verdict = self.policy.verdict(kind)
        self.faults.append(Fault(kind=kind, where=where, text=text, verdict=verdict))
        return verdict

    def indexed(self, index: Path, files: Sequence[Path]) -> Listing:
        rows = []
        for number, row in rows_of(index):
            if isinstance(row, FaultError):
                self.fault(row.kind, f"{index}:{number}", str(row))
            else:
                rows.append((f"{index}:{number}", row))
        known = {key for _, row in rows for key in row}
        samples = [s for where, row in rows if (s := self._row(index, where, row, known))]
        hints = {s.hint for s in samples}
        for path in files:
            if path not in self.listed and path not in hints:
                text = f"{path} is not in {index.name}, so it is not trained on"
                self.fault(Kind.UNLISTED, str(path), text)
        return Listing(where=str(index), samples=tuple(samples), faults=tuple(self.faults))

    def _row(self, index: Path, where: str, row: Row, known: Collection[str]) -> Sample | None:
        name = row.get(self.columns.file)
        if not isinstance(name, str) or not name:
            self._no_text(where, row, self.columns.file)
            return None
        captions = _captions(row.get(self.columns.caption))
        if self.columns.caption not in known or captions is None:
            self._no_text(where, row, self.columns.caption)
            return None
        path = self._existing(Kind.ABSENT, where, index.parent, name)
        if path is None:
            return None
        if path in self.listed:
            text = f"{where} lists {path} again ({self.listed[path]} does); it counts twice"
            self.fault(Kind.REPEATED, where, text)
        self.listed.setdefault(path, where)
        if not captions and self._no_caption(where) is not Verdict.USED:
            return None
        hint = None
        if self.columns.hint is not None:
            value = row.get(self.columns.hint)
            if self.columns.hint not in known or not isinstance(value, str | None):
                self._no_text(where, row, self.columns.hint)
                return None
            if not value:
                text = f"{where} has no hint under {self.columns.hint!r}; add one, or choose "
                self.fault(Kind.HINT_ABSENT, where, text + "broken_images=skip")
                return None
            hint = self._existing(Kind.HINT_ABSENT, where, index.parent, value)
            if hint is None:
                return None
        first, *others = captions or ("",)
        return Sample(path=path, caption=first, others=tuple(others), hint=hint)

    def beside(self, folder: Path, files: Sequence[Path]) -> Listing:
        if not any(p.with_suffix(".txt").is_file() for p in files):
            misses = [f.where for f in self.faults if f.kind is Kind.IGNORED]
            raise DataError(
                f"{folder} has {len(files)} images, no metadata.jsonl, metadata.csv or "
                "metadata.parquet, and no .txt beside an image"
                + (f" (it has {', '.join(misses)}, which is none of these)" if misses else "")
                + '; give one JSON line per image, such as {"file_name": "0001.png", "text": '
                '"a red square"}'
            )
        twins = Counter(p.with_suffix("") for p in files)
        told: dict[Path, list[Path]] = defaultdict(list)
        samples = []
        for path in files:
            if twins[path.with_suffix("")] > 1:
                told[path.with_suffix(".txt")].append(path)
            sample = self._beside(path)
            if sample is not None:
                samples.append(sample)
        for text, paths in told.items():
            names = ", ".join(p.name for p in paths)
            self.fault(Kind.TWINS, str(text), f"{names} share {text}; each is trained with it")
        return Listing(where=str(folder), samples=tuple(samples), faults=tuple(self.faults))

    def _beside(self, path: Path) -> Sample | None:
        text, caption = path.with_suffix(".txt"), ""
        if text.is_file():
            try:
                caption = read_text(text.read_bytes(), str(text))
            except FaultError as error:
                if self.fault(error.kind, str(text), str(error)) is not Verdict.USED:
                    return None
                return Sample(path=path)
        if not caption and self._no_caption(str(path)) is not Verdict.USED:
            return None
        return Sample(path=path, caption=caption)

    def _no_caption(self, where: str) -> Verdict:
        return self.fault(Kind.NO_CAPTION, where, no_caption(where))

    def _no_text(self, where: str, row: Row, column: str) -> None:
        keys = ", ".join(sorted(map(str, row))) or "none"
        self.fault(
            Kind.LINE, where,
            f"{where} has no text under {column!r}; keys found: {keys}; "
            "name the right ones with file_column=, caption_column= and hint_column=",
        )  # fmt: skip

    def _existing(self, kind: Kind, where: str, folder: Path, name: str) -> Path | None:
        path = folder / name
        if path.is_file():
            return path
        guesses = (folder / Path(name).name, folder.parent / name)
        near = next((g for g in guesses if g.is_file()), None)
        hint = f" ({near} does: paths are relative to the index)" if near is not None else ""
        self.fault(kind, where, f"{where} names {path}, which does not exist{hint}")
        return None


def no_caption(where: str) -> str:
    """What to say of an image without a caption."""
    return (
        f"{where} has no caption; add one, or choose missing_captions=skip (leave the image out) "
        "or missing_captions=empty (train it on the empty caption)"
    )


def read_text(data: bytes, where: str) -> str:
    """A caption file's text without byte order mark, and without space around it.

    Raises:
        FaultError: It is not UTF-8; what other encoding it has cannot be known from it.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").strip()
    except UnicodeDecodeError as error:
        raise FaultError(
            Kind.ENCODING,
            f"{where} is not UTF-8 ({error.reason} at byte {error.start}); convert it, for example "
            "from latin-1, or choose missing_captions=skip or empty",
        ) from error


def _captions(value: Any) -> tuple[str, ...] | None:
    """Captions of an index' value, blank ones left out; None if it is no text and no list of it."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str | None) for t in texts):
        return None
    return tuple(t.strip() for t in texts if t and t.strip())

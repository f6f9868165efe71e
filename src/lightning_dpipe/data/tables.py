"""Rows of an index file: JSON lines, a table of commas, or Parquet.

In:     ``metadata.jsonl``, ``metadata.csv`` or ``metadata.parquet``.
Out:    (line or row number, mapping by column) in file order; a bad line is a `FaultError` in its
        place, so that the others are read.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.faults import FaultError, Kind

INDEX_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
Row = Mapping[str, Any]


def index_of(folder: Path) -> Path | None:
    """The folder's index, the first of `INDEX_NAMES` that is there."""
    return next((folder / name for name in INDEX_NAMES if (folder / name).is_file()), None)


def near_misses(folder: Path) -> list[Path]:
    """Files that look like an index and are not read: ``metadata.json1``, or a second index."""
    index = index_of(folder)
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.lower().startswith("metadata") and path != index and path.is_file()
    )


def rows_of(index: Path) -> Iterator[tuple[int, Row | FaultError]]:
    """Read an index.

    Raises:
        DataError: The file as a whole cannot be read, or Parquet's package is not installed.
    """
    if index.suffix == ".jsonl":
        yield from _json_rows(index)
    elif index.suffix == ".csv":
        yield from _csv_rows(index)
    else:
        yield from _parquet_rows(index)


def _json_rows(index: Path) -> Iterator[tuple[int, Row | FaultError]]:
    with index.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                # json.loads guesses UTF-16 and the like from bytes, but not a byte order mark.
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # UnicodeDecodeError is one
                what = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON"
                yield number, FaultError(Kind.LINE, f"{index}:{number} is {what}: {error}")
                continue
            yield number, row if isinstance(row, dict) else {}


def _csv_rows(index: Path) -> Iterator[tuple[int, Row]]:
    try:
        with index.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            for row in reader:
                yield reader.line_num, {k: v for k, v in row.items() if k is not None}
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{index} cannot be read as a UTF-8 table of commas: {error}") from error


def _parquet_rows(index: Path) -> Iterator[tuple[int, Row]]:
    if find_spec("pyarrow") is None:
        raise DataError(
            f"{index} needs pyarrow, which is not installed; install it with: "
            "pip install 'lightning-dpipe[parquet]', or write the index as metadata.jsonl"
        )
    from pyarrow import ArrowException, parquet  # an extra, and slow to import

    try:
        with parquet.ParquetFile(index) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        raise DataError(f"{index} cannot be read as Parquet: {error}") from error

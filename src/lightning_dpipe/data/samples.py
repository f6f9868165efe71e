"""One sample as the readers list it, before anything is decoded."""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lightning_dpipe.data.faults import Fault


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside an uncompressed archive, read in place.

    It has what readers use of a `Path`: ``name``, ``open``, ``read_bytes``, and text for messages.
    """

    archive: Path
    name: str
    offset: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.archive}:{self.name}"

    def open(self, mode: str = "rb") -> BinaryIO:
        """The member's bytes as a file of its own; only what is read is fetched."""
        return io.BufferedReader(_Window(self))

    def read_bytes(self) -> bytes:
        """All bytes of the member."""
        with self.open() as file:
            return file.read()


Stored = Path | Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One image (or its latents) and what it is trained with.

    `caption` is the first caption; `others` are further ones, of which one is drawn each epoch.
    """

    path: Stored
    caption: str = ""
    others: tuple[str, ...] = ()
    hint: Stored | None = None
    label: int | None = None

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions, in order."""
        return (self.caption, *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a reader found: samples in order, and faults; those refused or skipped are no samples.

    `where` names the set in messages.
    """

    where: str
    samples: tuple[Sample, ...]
    faults: tuple[Fault, ...] = ()


class _Window(io.RawIOBase):
    """The bytes ``[offset, offset + num_bytes)`` of a file."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._file = member.archive.open("rb", buffering=0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        left = max(0, self._member.num_bytes - self._at)
        data = os.pread(self._file.fileno(), min(len(buffer), left), self._member.offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._member.num_bytes}
        self._at = max(0, start[whence] + offset)
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

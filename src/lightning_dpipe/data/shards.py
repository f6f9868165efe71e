"""Samples in uncompressed tar archives, as WebDataset lays them out.

In:     archives in which files of one stem are one sample: ``0001.jpg`` (or png, webp), and
        ``0001.txt``, ``0001.json`` or ``0001.cls``.
Out:    `Sample`s that are read in place. As every sample has a number, an ordinary sampler splits
        them: none is lost or doubled, however many archives, ranks and loader processes there are.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from lightning_dpipe.data.captions import no_caption, read_text
from lightning_dpipe.data.faults import Fault, FaultError, Kind, Policy, Verdict
from lightning_dpipe.data.samples import Listing, Member, Sample
from lightning_dpipe.data.walk import IMAGES

_WHOLE_NUMBER = re.compile(r"\s*(\d+)\s*")


class Condition(str, Enum):
    """What a sample is trained with."""

    CAPTION = "caption"
    LABEL = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Endings of a sample's files: the image's (None: any that is known) and the hint's.

    `caption` is the key of the caption in a ``.json`` file.
    """

    image: str | None = None
    hint: str | None = None
    caption: str = "caption"


def list_shards(
    archives: Sequence[Path],
    *,
    keys: Keys | None = None,
    condition: Condition = Condition.CAPTION,
    policy: Policy | None = None,
) -> Listing:
    """Go through the archives once, reading headers, captions and labels.

    Args:
        archives: In order; samples keep the order of archives and of members.
        keys: Which files of a sample are which.
        condition: Whether samples need captions or labels.
        policy: What becomes of what cannot be used.
    """
    reader = _Reader(keys or Keys(), condition, policy or Policy())
    samples = [
        sample
        for archive in archives
        for stem, files in reader.stems(archive).items()
        if (sample := reader.sample(f"{archive}:{stem}", files)) is not None
    ]
    where = (
        str(archives[0]) if len(archives) == 1 else f"{archives[0]} and {len(archives) - 1} more"
    )
    return Listing(where=where, samples=tuple(samples), faults=tuple(reader.faults))


@dataclass(frozen=True, slots=True)
class _Reader:
    keys: Keys
    condition: Condition
    policy: Policy
    faults: list[Fault] = field(default_factory=list)

    def fault(self, kind: Kind, where: str, text: str) -> Verdict:
        verdict = self.policy.verdict(kind)
        self.faults.append(Fault(kind=kind, where=where, text=text, verdict=verdict))
        return verdict

    def stems(self, archive: Path) -> dict[str, dict[str, Member]]:
        """Members by stem and ending, in order of first appearance."""
        found: dict[str, dict[str, Member]] = {}
        for member in self._members(archive):
            folder, slash, name = member.name.rpartition("/")
            stem, dot, ending = name.partition(".")
            if not dot or not stem:
                text = f"{member} belongs to no sample: its name is not STEM.ENDING"
                self.fault(Kind.IGNORED, str(member), text)
                continue
            files = found.setdefault(folder + slash + stem, {})
            if ending.lower() in files:
                text = f"{member} occurs again in the same archive; the first one counts"
                self.fault(Kind.REPEATED, str(member), text)
            files.setdefault(ending.lower(), member)
        return found

    def _members(self, archive: Path) -> Iterator[Member]:
        num_bytes = archive.stat().st_size
        try:
            with tarfile.open(archive, "r:") as opened:
                for info in opened:
                    where = f"{archive}:{info.name}"
                    if info.isdir():
                        continue
                    if not info.isreg():
                        self.fault(Kind.IGNORED, where, f"{where} is a link or device, not a file")
                    elif info.offset_data + info.size > num_bytes:
                        raise tarfile.ReadError(f"it ends within {info.name}")
                    else:
                        yield Member(archive, info.name, info.offset_data, info.size)
        except (tarfile.TarError, OSError) as error:
            self.fault(
                Kind.ARCHIVE, str(archive),
                f"{archive} cannot be read to its end: {error}; make it again (uncompressed), or "
                "choose broken_images=skip, which keeps the samples before",
            )  # fmt: skip

    def sample(self, where: str, files: Mapping[str, Member]) -> Sample | None:
        image = self._image(files)
        if image is None:
            endings = ", ".join(sorted(files))
            self.fault(Kind.ARCHIVE, where, f"{where} has no image among its files: {endings}")
            return None
        hint = None
        if self.keys.hint is not None:
            hint = files.get(self.keys.hint.lower())
            if hint is None:
                text = f"{where} has no .{self.keys.hint} beside its image"
                self.fault(Kind.HINT_ABSENT, where, text)
                return None
        if self.condition is Condition.LABEL:
            label = self._label(where, files)
            return None if label is None else Sample(path=image, hint=hint, label=label)
        captions = self._captions(where, files)
        if captions is None:
            return None
        return Sample(path=image, caption=captions[0], others=tuple(captions[1:]), hint=hint)

    def _image(self, files: Mapping[str, Member]) -> Member | None:
        if self.keys.image is not None:
            return files.get(self.keys.image.lower())
        return next((m for ending, m in files.items() if f".{ending}" in IMAGES), None)

    def _captions(self, where: str, files: Mapping[str, Member]) -> Sequence[str] | None:
        """At least one caption; None leaves the sample out."""
        try:
            texts = list(_texts(files, self.keys.caption))
        except FaultError as error:
            return [""] if self.fault(error.kind, where, str(error)) is Verdict.USED else None
        if not texts:
            verdict = self.fault(Kind.NO_CAPTION, where, no_caption(where))
            return [""] if verdict is Verdict.USED else None
        return texts

    def _label(self, where: str, files: Mapping[str, Member]) -> int | None:
        text = files["cls"].read_bytes() if "cls" in files else b""
        number = _WHOLE_NUMBER.fullmatch(text.decode("utf-8", errors="replace"))
        if number is None:
            self.fault(Kind.NO_LABEL, where, f"{where} has no .cls file with a whole number")
            return None
        return int(number.group(1))


def _texts(files: Mapping[str, Member], key: str) -> Iterator[str]:
    if "txt" in files:
        text = read_text(files["txt"].read_bytes(), str(files["txt"]))
        yield from [text] if text else []
    elif "json" in files:
        where = str(files["json"])
        try:
            told: Any = json.loads(read_text(files["json"].read_bytes(), where))
        except json.JSONDecodeError as error:
            raise FaultError(Kind.NO_CAPTION, f"{where} is not JSON: {error}") from error
        value = told.get(key) if isinstance(told, dict) else None
        for caption in value if isinstance(value, list) else [value]:
            if isinstance(caption, str) and caption.strip():
                yield caption.strip()

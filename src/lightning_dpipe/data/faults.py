"""What can be wrong with a data set, and what training does about it.

In:     files and lines as the readers meet them, and the user's choices.
Out:    `Fault`s: nothing is raised while a set is read, so that all faults are known at once, and
        every rank and the doctor decide alike. `settled` raises what training refuses.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from lightning_dpipe.core.errors import DataError


class Missing(str, Enum):
    """What becomes of an image without a caption."""

    ERROR = "error"
    SKIP = "skip"
    EMPTY = "empty"


class Broken(str, Enum):
    """What becomes of an image, or of its hint, that cannot be used."""

    ERROR = "error"
    SKIP = "skip"


class Verdict(str, Enum):
    """What training does with a fault."""

    REFUSED = "training refuses"
    SKIPPED = "left out"
    USED = "trained on"


class Kind(str, Enum):
    """Kinds of faults, in the order of reports."""

    LINE = "unusable line of the index"
    ABSENT = "listed, but not there"
    EMPTY_FILE = "empty file"
    NOT_AN_IMAGE = "not an image"
    DAMAGED = "damaged or cut short"
    NO_RANGE = "pixel values of unknown range"
    MOMENTS = "no mean and log-variance"
    ARCHIVE = "unusable archive or member"
    HINT_ABSENT = "no hint"
    HINT_SHAPE = "hint of another aspect ratio"
    NO_CAPTION = "no caption"
    ENCODING = "caption that is not UTF-8"
    NO_LABEL = "no label"
    UNLISTED = "image that the index does not list"
    IGNORED = "file that is not read"
    REPEATED = "listed more than once"
    TWINS = "images that share a caption file"
    SWAPPED = "hint and image look swapped"
    CAPTION_CUT = "caption longer than its tokens"
    SMALL = "smaller than the training size"
    CROPPED = "less than half is left after cropping"
    DEEP = "16-bit, scaled to 8"
    INKS = "CMYK, converted"
    TRANSPARENT = "transparent, laid on white"
    TURNED = "turned as its EXIF says"
    ANIMATED = "several pictures, the first one counts"


_CAPTIONS = frozenset((Kind.NO_CAPTION, Kind.ENCODING))
_FILES = frozenset(
    (
        Kind.ABSENT, Kind.EMPTY_FILE, Kind.NOT_AN_IMAGE, Kind.DAMAGED, Kind.NO_RANGE, Kind.MOMENTS,
        Kind.ARCHIVE, Kind.HINT_ABSENT, Kind.HINT_SHAPE, Kind.NO_LABEL,
    )
)  # fmt: skip
_LEFT_OUT = frozenset((Kind.UNLISTED, Kind.IGNORED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The user's choices: ``missing_captions`` and ``broken_images``."""

    missing: Missing = Missing.ERROR
    broken: Broken = Broken.ERROR

    def verdict(self, kind: Kind) -> Verdict:
        """What training does with a fault of this kind."""
        if kind is Kind.LINE:
            return Verdict.REFUSED
        if kind in _CAPTIONS:
            chosen: Missing | Broken = self.missing
        elif kind in _FILES:
            chosen = self.broken
        else:
            return Verdict.SKIPPED if kind in _LEFT_OUT else Verdict.USED
        if chosen is Missing.EMPTY:
            return Verdict.USED
        return Verdict.REFUSED if chosen.value == "error" else Verdict.SKIPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: where it is, and a sentence that says what and what to do."""

    kind: Kind
    where: str
    text: str
    verdict: Verdict


class FaultError(DataError):
    """A file that cannot be used, with the kind of its fault."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def settled(faults: Iterable[Fault]) -> None:
    """Raise if training refuses any of these.

    Raises:
        DataError: The first refused fault in full, and how many others there are.
    """
    refused = [f for f in faults if f.verdict is Verdict.REFUSED]
    if refused:
        others = len(refused) - 1
        more = f" ({others} more such faults: `dpipe doctor` lists all)" if others else ""
        raise DataError(refused[0].text + more)


def counted(faults: Iterable[Fault]) -> Mapping[tuple[Kind, Verdict], int]:
    """How often each kind occurs, in the order of `Kind`."""
    counts = Counter((f.kind, f.verdict) for f in faults)
    order = {kind: place for place, kind in enumerate(Kind)}
    return {key: counts[key] for key in sorted(counts, key=lambda k: order[k[0]])}

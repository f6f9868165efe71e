"""The samples that are trained on, decided before training.

In:     a reader's `Listing`, the shape classes, and the user's choices.
Out:    an `Inventory`: usable samples with their classes, and all faults. It depends on files and
        choices only; where several ranks train, rank 0 takes it for all of them.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from lightning_dpipe.data.buckets import nearest_bucket
from lightning_dpipe.data.faults import (
    Fault,
    FaultError,
    Kind,
    Policy,
    Verdict,
    counted,
)
from lightning_dpipe.data.images import Probe
from lightning_dpipe.data.samples import Listing, Sample, Stored

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of files done and of all files."""

ASPECT_TOLERANCE = 0.01
"""Relative difference of a hint's aspect ratio from its image's that rounding explains."""
_GREY, _COLOURED = 0.01, 0.05
_MOST_THREADS = 8
_AHEAD = 1000


class Check(str, Enum):
    """How much of each file is read before training."""

    NONE = "none"
    HEADER = "header"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Usable samples, the shape class of each, and the faults of the whole set."""

    where: str
    samples: tuple[Sample, ...]
    buckets: tuple[str, ...]
    faults: tuple[Fault, ...]

    def part(self, places: Iterable[int]) -> "Inventory":
        """The samples at `places`; faults stay with the whole."""
        chosen = tuple(places)
        return Inventory(
            where=self.where,
            samples=tuple(self.samples[i] for i in chosen),
            buckets=tuple(self.buckets[i] for i in chosen),
            faults=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How files are looked at: `probe` one, as far as `check` says; `sides` by shape class."""

    probe: Callable[..., Probe]
    sides: Mapping[str, tuple[int, int]]
    check: Check
    policy: Policy


def take_inventory(listing: Listing, look: Look, progress: Progress | None = None) -> Inventory:
    """Look at every listed file, and sort the samples into usable ones and faults.

    The files of several samples are looked at side by side; the result does not depend on it.
    """
    samples, buckets, faults = [], [], list(listing.faults)
    first = next(iter(look.sides))
    grey_images = coloured_hints = num_pairs = 0
    for sample, (image, hint, found) in _looked_at(listing.samples, look, progress):
        faults += found
        if any(f.verdict is not Verdict.USED for f in found):
            continue
        samples.append(sample)
        buckets.append(nearest_bucket(image.height, image.width, look.sides) if image else first)
        if image is not None and hint is not None and None not in (image.colour, hint.colour):
            num_pairs += 1
            grey_images += (image.colour or 0.0) < _GREY
            coloured_hints += (hint.colour or 0.0) > _COLOURED
    if num_pairs and grey_images == num_pairs and coloured_hints > num_pairs // 2:
        faults.append(_fault(
            Kind.SWAPPED, listing.where, look.policy,
            f"all {num_pairs} images of {listing.where} are grey and {coloured_hints} hints have "
            "colours; if that is the wrong way round, swap file_column and hint_column",
        ))  # fmt: skip
    return Inventory(
        where=listing.where,
        samples=tuple(samples),
        buckets=tuple(buckets),
        faults=tuple(faults),
    )


def left_out(faults: Sequence[Fault]) -> str:
    """One line of counts for the log; empty if nothing is left out."""
    counts = {k: n for (k, v), n in counted(faults).items() if v is Verdict.SKIPPED}
    return ", ".join(f"{kind.value}: {count}" for kind, count in counts.items())


_Looked = tuple[Probe | None, Probe | None, list[Fault]]


def _looked_at(
    samples: Sequence[Sample], look: Look, progress: Progress | None
) -> Iterator[tuple[Sample, _Looked]]:
    if look.check is Check.NONE and len(look.sides) == 1:
        yield from ((sample, (None, None, [])) for sample in samples)
        return
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    remaining = iter(samples)
    with ThreadPoolExecutor(threads) as pool:
        done = 0
        while chunk := list(islice(remaining, _AHEAD)):  # bounds what waits in memory
            for sample, looked in zip(
                chunk, pool.map(lambda s: _look(s, look), chunk), strict=True
            ):
                done += 1
                if progress is not None:
                    progress(done, len(samples))
                yield sample, looked


def _look(sample: Sample, look: Look) -> _Looked:
    faults: list[Fault] = []
    image = _probed(sample.path, look, faults)
    if image is not None:
        faults += _size_faults(sample.path, image, look)
    hint = _probed(sample.hint, look, faults) if sample.hint is not None else None
    if image is not None and hint is not None:
        aspects = image.width / image.height, hint.width / hint.height
        if abs(aspects[0] / aspects[1] - 1) > ASPECT_TOLERANCE:
            faults.append(_fault(
                Kind.HINT_SHAPE, str(sample.hint), look.policy,
                f"{sample.hint} is {hint.height} x {hint.width} and its image {sample.path} "
                f"{image.height} x {image.width}: cropped to one shape they would not fit together",
            ))  # fmt: skip
    return image, hint, faults


def _probed(source: Stored, look: Look, faults: list[Fault]) -> Probe | None:
    try:
        found = look.probe(source, decode=look.check is Check.DECODE)
    except FaultError as error:
        faults.append(_fault(error.kind, str(source), look.policy, str(error)))
        return None
    for kind in found.notes:
        faults.append(_fault(kind, str(source), look.policy, f"{source}: {kind.value}"))
    return found


def _size_faults(source: Stored, found: Probe, look: Look) -> Iterator[Fault]:
    high, wide = look.sides[nearest_bucket(found.height, found.width, look.sides)]
    kept = min(found.height / high, found.width / wide) ** 2 * high * wide
    share = kept / (found.height * found.width)
    sizes = f"{source} is {found.height} x {found.width} and is trained at {high} x {wide}"
    if share < 0.5:
        text = f"{sizes}: {share:.1%} of it is left after cropping"
        yield _fault(Kind.CROPPED, str(source), look.policy, text)
    if found.height < high or found.width < wide:
        yield _fault(Kind.SMALL, str(source), look.policy, f"{sizes}: it is enlarged")


def _fault(kind: Kind, where: str, policy: Policy, text: str) -> Fault:
    return Fault(kind=kind, where=where, text=text, verdict=policy.verdict(kind))


class Told:
    """Progress for the log, every few seconds and not before the first of them."""

    def __init__(self, what: str, *, tell: Callable[[str], Any], every_s: float = 2.0) -> None:
        self._what, self._tell, self._every_s = what, tell, every_s
        self._last_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is, if it is time."""
        now_s = time.monotonic()
        if now_s - self._last_s >= self._every_s:
            self._last_s = now_s
            self._tell(f"{self._what}: {done} of {total} files ({done / total:.0%})")

"""Names of archives: braces written out, folders listed.

In:     ``data-{000000..000146}.tar``, ``{a,b}.tar``, a folder, or several of these.
Out:    paths in the order given.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_dpipe.core.errors import DataError

_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(pattern: str) -> Iterator[str]:
    """Write out ``{first..last}`` (zeros in front are kept) and ``{one,other}``.

    Raises:
        DataError: A brace has neither form, or a range runs backwards.
    """
    found = _INNERMOST.search(pattern)
    if found is None:
        yield pattern
        return
    for text in _choices(pattern, found.group(1)):
        yield from expand_braces(pattern[: found.start()] + text + pattern[found.end() :])


def archive_paths(given: str | Path | Sequence[str]) -> tuple[Path, ...]:
    """Paths that patterns and folders (all ``.tar`` in them, sorted) stand for.

    Raises:
        DataError: There are none, one is listed twice, does not exist, or cannot be read in place.
    """
    paths: list[Path] = []
    for pattern in [given] if isinstance(given, str | Path) else given:
        if str(pattern).startswith("pipe:") or "://" in str(pattern):
            raise DataError(
                f"{pattern} is read as a stream, which has no length and cannot be shuffled; copy "
                "the archives to a disk that all ranks see, and give their paths"
            )
        for name in expand_braces(str(pattern)):
            path = Path(name)
            paths += sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not paths:
        raise DataError(f"{given} holds no archive; expected files whose names end in .tar")
    repeated = {str(p) for p in paths if paths.count(p) > 1} if len(set(paths)) < len(paths) else ()
    if repeated:
        raise DataError(f"{', '.join(sorted(repeated))} is listed twice; list each archive once")
    absent = [p for p in paths if not p.is_file()]
    if absent:
        raise DataError(f"{len(absent)} of {len(paths)} archives do not exist, first {absent[0]}")
    return tuple(paths)


def _choices(pattern: str, inside: str) -> list[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        if "," not in inside:
            raise DataError(
                f"{pattern}: {{{inside}}} is neither {{first..last}} nor a list {{a,b}} of names"
            )
        return inside.split(",")
    first, last = numbers.groups()
    if int(first) > int(last):
        raise DataError(f"{pattern}: {{{inside}}} runs backwards; give the smaller number first")
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [str(n).zfill(width) for n in range(int(first), int(last) + 1)]

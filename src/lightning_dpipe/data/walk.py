"""Files of a folder and of the folders in it, in an order that every machine agrees on.

Links to folders are followed, once each, so that a link to a folder above ends. What begins with a
dot is not looked at: other systems leave such files beside images (``._0001.jpg``).
"""

import os
from collections.abc import Collection
from pathlib import Path

from lightning_dpipe.core.errors import DataError

IMAGES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))


def files_under(folder: Path, suffixes: Collection[str] = IMAGES) -> list[Path]:
    """Paths with one of `suffixes` (in lower case, compared without case), sorted.

    Raises:
        DataError: The folder does not exist, or cannot be listed.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the one that holds the data")

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be listed: {error.strerror}") from error

    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for at, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        known = os.stat(at)
        if (known.st_dev, known.st_ino) in seen:
            folders.clear()
            continue
        seen.add((known.st_dev, known.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(at) / name
            for name in files
            if not name.startswith(".") and Path(name).suffix.lower() in suffixes
        ]
    return sorted(found)

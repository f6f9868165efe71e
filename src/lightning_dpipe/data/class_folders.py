"""Images in one folder per class, as ImageNet is usually laid out.

In:     a folder of folders. Out: `Sample`s whose label is the place of their folder in sorted
        order, counted over all folders, empty ones too. Nothing is written into the folder.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.faults import Fault, Kind, Policy
from lightning_dpipe.data.samples import Listing, Sample
from lightning_dpipe.data.walk import IMAGES, files_under


def class_names(folder: Path) -> tuple[str, ...]:
    """Names of the classes; a class' place is its label.

    Raises:
        DataError: There is no folder in `folder`.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the one that holds a folder per class")
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{folder} holds no folders; expected one per class, with its images")
    return tuple(names)


def list_classes(
    folder: Path,
    classes: Sequence[str],
    *,
    policy: Policy | None = None,
    suffixes: Collection[str] = IMAGES,
) -> Listing:
    """List the images of each class.

    Args:
        folder: Holds the class folders.
        classes: Their names by label, those of the training set for both splits.
        policy: What becomes of what cannot be used.
        suffixes: Of the files, in lower case.

    Raises:
        DataError: A folder is none of `classes`.
    """
    policy = policy or Policy()
    unknown = sorted(set(class_names(folder)) - set(classes))
    if unknown:
        raise DataError(
            f"{folder} has {len(unknown)} folders that are no class to train on, such as "
            f"{unknown[0]!r}; there are {len(classes)} classes: {', '.join(classes[:5])}, ..."
        )
    samples, faults = [], []

    def fault(kind: Kind, path: Path, text: str) -> None:
        verdict = policy.verdict(kind)
        faults.append(Fault(kind=kind, where=str(path), text=f"{path} {text}", verdict=verdict))

    for label, name in enumerate(classes):
        files = files_under(folder / name, suffixes) if (folder / name).is_dir() else []
        if not files:
            fault(Kind.IGNORED, folder / name, f"has no image; label {label} is never seen")
        samples += [Sample(path=path, label=label) for path in files]
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in suffixes and path.is_file() and path.name[0] != ".":
            fault(Kind.UNLISTED, path, "is in no class folder, so it is not trained on")
    return Listing(where=str(folder), samples=tuple(samples), faults=tuple(faults))

"""Your own images in class folders, decoded when they are read.

In:     a folder per class; or ``train/`` and ``validation/`` of that kind.
Out:    batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]`` and label int64
        ``[batch]``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.class_folders import class_names, list_classes
from lightning_dpipe.data.conditions import Conditions, labels_of
from lightning_dpipe.data.image_folder import has_splits
from lightning_dpipe.data.samples import Listing, Sample
from lightning_dpipe.data.stored import ALL, TRAIN, StoredDataModule, StoredOptions


class ClassFoldersDataModule(StoredDataModule):
    """Labelled images; a label is the place of the class' folder in sorted order.

    Args:
        path: Folder that holds the class folders, or ``train/`` and ``validation/``.
        num_classes: Classes of the model; more folders are refused.
        options: Fields of `StoredOptions`.
    """

    def __init__(self, *, path: str | Path, num_classes: int | None = None, **options: Any) -> None:
        super().__init__(StoredOptions(**options))
        self.path = Path(path).expanduser()
        self.num_classes = num_classes

    def is_split(self) -> bool:
        """Whether there are folders ``train/`` and ``validation/``."""
        return has_splits(self.path)

    def list_part(self, part: str) -> Listing:
        """List the class folders; both splits count classes as the training set does.

        Raises:
            DataError: There are more classes than the model has.
        """
        classes = class_names(self.path / (TRAIN if self.is_split() else ALL))
        if self.num_classes is not None and len(classes) > self.num_classes:
            raise DataError(
                f"{self.path} has {len(classes)} class folders, the model {self.num_classes} "
                "classes; raise its num_embeds_ada_norm, or give the folder that holds the classes"
            )
        return list_classes(self.path / part, classes, policy=self.options.policy)

    def conditions(self, samples: Sequence[Sample], *, training: bool) -> Conditions:
        """Labels."""
        return labels_of(samples, self.num_classes)

    def check_conditions(self, samples: Sequence[Sample], *, training: bool) -> None:
        """Refuse labels that the model has no class for."""
        labels_of(samples, self.num_classes)

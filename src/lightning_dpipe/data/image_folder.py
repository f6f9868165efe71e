"""Your own captioned images, decoded when they are read.

In:     a folder as `captions` reads it; or one with ``train/`` and ``validation/`` of that kind.
Out:    batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, input_ids and
        attention_mask int64 ``[batch, num_tokens]`` (input_ids_2, ... for more tokenizers), and, if
        asked for, hint float32 ``[batch, 3, size, size]`` in ``[0, 1]``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.captions import Columns, list_captions
from lightning_dpipe.data.conditions import Conditions, caption_tokens
from lightning_dpipe.data.samples import Listing, Sample
from lightning_dpipe.data.stored import TRAIN, VALIDATION, StoredDataModule, StoredOptions, seed
from lightning_dpipe.models.parts import Source, caption_fields


class ImageFolderDataModule(StoredDataModule):
    """Captioned images for Stable Diffusion, and with a hint column for ControlNet.

    Args:
        path: Folder that holds images and captions, or ``train/`` and ``validation/``.
        folder: Another name of `path`.
        tokenizer: Folder or hub id of a diffusers pipeline, for its tokenizers.
        num_tokens: Length captions are padded or cut to; a list is one length per tokenizer.
        file_column: Key of the image's path in the index.
        caption_column: Key of its caption, or list of captions.
        hint_column: Key of its hint's path; None reads no hints.
        options: Fields of `StoredOptions`.

    Raises:
        DataError: No folder is given.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        folder: str | Path | None = None,
        tokenizer: str | None = None,
        num_tokens: int | Sequence[int] = 77,
        file_column: str = "file_name",
        caption_column: str = "text",
        hint_column: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(StoredOptions(**options))
        self.path = one_path(path, folder)
        self.tokenizer = tokenizer
        self.num_tokens = num_tokens
        self.columns = Columns(file=file_column, caption=caption_column, hint=hint_column)

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """Captions of the validation images, in order."""
        return tuple(sample.caption for sample in self.dataset(1).samples)

    def is_split(self) -> bool:
        """Whether there are folders ``train/`` and ``validation/``."""
        return has_splits(self.path)

    def tokenized(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Token fields of any captions, to draw them.

        Raises:
            DataError: No tokenizer is given.
        """
        if self.tokenizer is None:
            raise DataError("prompts need a tokenizer, and none is given; give data.tokenizer=")
        return caption_fields(Source(path=self.tokenizer), list(captions), self.num_tokens)

    def list_part(self, part: str) -> Listing:
        """Read the index of a folder, or the text files beside its images."""
        return list_captions(self.path / part, columns=self.columns, policy=self.options.policy)

    def conditions(self, samples: Sequence[Sample], *, training: bool) -> Conditions:
        """Tokens of the captions."""
        return caption_tokens(
            samples,
            tokenizer=self.tokenizer,
            num_tokens=self.num_tokens,
            seed=seed() if training else None,
        )


def one_path(path: str | Path | None, folder: str | Path | None) -> Path:
    """The path that is given under either name.

    Raises:
        DataError: None is, or two different ones.
    """
    given = {str(p) for p in (path, folder) if p is not None}
    if len(given) != 1:
        what = " and ".join(sorted(given)) if given else "nothing"
        raise DataError(f"data.path is {what}; give the one folder that holds the data")
    return Path(given.pop()).expanduser()


def has_splits(folder: Path) -> bool:
    """Whether a folder holds ``train/`` and ``validation/``."""
    return (folder / TRAIN).is_dir() and (folder / VALIDATION).is_dir()

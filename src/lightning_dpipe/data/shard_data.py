"""Your own images in tar archives, read in place.

In:     archives as `shards` reads them; or a folder with ``train/`` and ``validation/`` of them.
Out:    batches of image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, with input_ids int64
        ``[batch, num_tokens]`` or label int64 ``[batch]``; hint as in `image_folder`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dpipe.data.braces import archive_paths
from lightning_dpipe.data.conditions import Conditions, caption_tokens, labels_of
from lightning_dpipe.data.image_folder import has_splits
from lightning_dpipe.data.samples import Listing, Sample
from lightning_dpipe.data.shards import Condition, Keys, list_shards
from lightning_dpipe.data.stored import ALL, StoredDataModule, StoredOptions, seed


class ShardsDataModule(StoredDataModule):
    """Images in WebDataset's layout, with captions or labels.

    Args:
        path: Archives: a folder, a pattern such as ``data-{000..146}.tar``, or a list of either.
        condition: ``caption`` or ``label`` (of ``.cls`` files).
        tokenizer: Folder or hub id of a diffusers pipeline, for its CLIP tokenizer.
        num_tokens: Length captions are padded or cut to; a list is one length per tokenizer.
        num_classes: Classes of the model; a larger label is refused.
        image_key: Ending of the images; None takes any that is known.
        hint_key: Ending of the hints, such as ``hint.png``; None reads none.
        caption_key: Key of the caption in a ``.json`` file.
        options: Fields of `StoredOptions`.
    """

    def __init__(
        self,
        *,
        path: str | Path | Sequence[str],
        condition: Condition | str = Condition.CAPTION,
        tokenizer: str | None = None,
        num_tokens: int | Sequence[int] = 77,
        num_classes: int | None = None,
        image_key: str | None = None,
        hint_key: str | None = None,
        caption_key: str = "caption",
        **options: Any,
    ) -> None:
        super().__init__(StoredOptions(**options))
        self.path = path
        self.condition = Condition(condition)
        self.tokenizer = tokenizer
        self.num_tokens = num_tokens
        self.num_classes = num_classes
        self.keys = Keys(image=image_key, hint=hint_key, caption=caption_key)

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """Captions of the validation images, in order; blank for labels."""
        return tuple(sample.caption for sample in self.dataset(1).samples)

    def is_split(self) -> bool:
        """Whether the path is a folder with ``train/`` and ``validation/``."""
        return isinstance(self.path, str | Path) and has_splits(Path(self.path).expanduser())

    def list_part(self, part: str) -> Listing:
        """Go through the archives' headers."""
        given = self.path
        if isinstance(given, str | Path):
            given = (
                str(Path(given).expanduser()) if part == ALL else Path(given).expanduser() / part
            )
        return list_shards(
            archive_paths(given),
            keys=self.keys,
            condition=self.condition,
            policy=self.options.policy,
        )

    def conditions(self, samples: Sequence[Sample], *, training: bool) -> Conditions:
        """Tokens of the captions, or labels."""
        if self.condition is Condition.LABEL:
            return labels_of(samples, self.num_classes)
        return caption_tokens(
            samples,
            tokenizer=self.tokenizer,
            num_tokens=self.num_tokens,
            seed=seed() if training else None,
        )

    def check_conditions(self, samples: Sequence[Sample], *, training: bool) -> None:
        """Refuse labels that the model has no class for."""
        if self.condition is Condition.LABEL:
            labels_of(samples, self.num_classes)

"""Precomputed latents with captions or labels.

In:     files as `latents` reads them, with an index or text files beside them as `captions` reads
        those, or in class folders; or ``train/`` and ``validation/`` of that kind.
Out:    batches of moments float32 ``[batch, 2 * channels, height, width]``, with input_ids int64
        ``[batch, num_tokens]`` or label int64 ``[batch]``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.captions import Columns, list_captions
from lightning_dpipe.data.class_folders import class_names, list_classes
from lightning_dpipe.data.conditions import Conditions, caption_tokens, labels_of
from lightning_dpipe.data.image_folder import has_splits
from lightning_dpipe.data.latents import LATENTS, LatentReader
from lightning_dpipe.data.samples import Listing, Sample
from lightning_dpipe.data.shards import Condition
from lightning_dpipe.data.stored import ALL, TRAIN, Decoder, StoredDataModule, StoredOptions, seed


class LatentsDataModule(StoredDataModule):
    """Moments of a VAE's posterior, for modules with ``precomputed=True``.

    Args:
        path: Folder of the files, or of ``train/`` and ``validation/``.
        condition: ``caption``, or ``label`` for class folders.
        channels: Latent channels of the VAE.
        factor: Pixels per latent along a side; sizes are given in pixels as for images.
        tokenizer: Folder or hub id of a diffusers pipeline, for its CLIP tokenizer.
        num_tokens: Length captions are padded or cut to; a list is one length per tokenizer.
        num_classes: Classes of the model; a larger label is refused.
        file_column: Key of a file's path in the index.
        caption_column: Key of its caption, or list of captions.
        options: Fields of `StoredOptions`.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        condition: Condition | str = Condition.CAPTION,
        channels: int = 4,
        factor: int = 8,
        tokenizer: str | None = None,
        num_tokens: int | Sequence[int] = 77,
        num_classes: int | None = None,
        file_column: str = "file_name",
        caption_column: str = "text",
        **options: Any,
    ) -> None:
        super().__init__(StoredOptions(**options))
        uneven = [side for pair in self.options.sides.values() for side in pair if side % factor]
        if uneven:
            raise DataError(f"{uneven[0]} pixels are no multiple of the VAE's {factor}")
        reader = LatentReader(channels=channels, factor=factor, sides=self.options.sides)
        self.decoder = Decoder(field="moments", probe=reader.probe, decode=reader.decode)
        self.path = Path(path).expanduser()
        self.condition = Condition(condition)
        self.tokenizer = tokenizer if self.condition is Condition.CAPTION else ""
        self.num_tokens = num_tokens
        self.num_classes = num_classes
        self.columns = Columns(file=file_column, caption=caption_column)

    @property
    def validation_captions(self) -> tuple[str, ...]:
        """Captions of the validation samples, in order; blank for labels."""
        return tuple(sample.caption for sample in self.dataset(1).samples)

    def is_split(self) -> bool:
        """Whether there are folders ``train/`` and ``validation/``."""
        return has_splits(self.path)

    def list_part(self, part: str) -> Listing:
        """Read an index, text files, or class folders."""
        policy = self.options.policy
        if self.condition is Condition.LABEL:
            classes = class_names(self.path / (TRAIN if self.is_split() else ALL))
            return list_classes(self.path / part, classes, policy=policy, suffixes=LATENTS)
        return list_captions(
            self.path / part, columns=self.columns, policy=policy, suffixes=LATENTS
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

"""What a sample is trained with beside its image: tokens of a caption, or a label.

In:     the number of a sample, and of the epoch.
Out:    batch fields of that sample. Of several captions one is drawn, keyed by (seed, epoch,
        sample): whichever rank or loader process reads the sample, it is the same one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoTokenizer

from lightning_dpipe.core.errors import DataError
from lightning_dpipe.data.samples import Sample
from lightning_dpipe.models.parts import Source, caption_fields, token_lengths
from lightning_dpipe.objective.draws import integers


class Conditions(Protocol):
    """Gives the fields of one sample."""

    def fields(self, index: int, epoch: int) -> dict[str, Tensor]:
        """Batch fields of sample `index` in `epoch`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CaptionTokens:
    """Tokens of all captions by batch field, int64 ``[captions, num_tokens]`` each.

    Sample i has the captions ``[starts[i], starts[i + 1])``. With `seed` None the first one counts.
    """

    tokens: Mapping[str, Tensor]
    starts: tuple[int, ...]
    seed: int | None = None

    def fields(self, index: int, epoch: int) -> dict[str, Tensor]:
        """Tokens of the caption that is drawn."""
        first, end = self.starts[index], self.starts[index + 1]
        at = first
        if self.seed is not None and end - first > 1:
            key = torch.tensor([[epoch, index]])
            at += int(integers(self.seed, "caption", key, end - first))
        return {name: ids[at] for name, ids in self.tokens.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Labels int64 ``[samples]``."""

    labels: Tensor

    def fields(self, index: int, epoch: int) -> dict[str, Tensor]:
        """``label`` of the sample."""
        return {"label": self.labels[index]}


def caption_tokens(
    samples: Sequence[Sample],
    *,
    tokenizer: str | None,
    num_tokens: int | Sequence[int],
    seed: int | None,
) -> CaptionTokens:
    """Tokenize all captions once.

    Raises:
        DataError: No tokenizer is given.
        SpecError: It cannot be loaded.
    """
    if tokenizer is None:
        raise DataError(
            "captions need a tokenizer, and none is given; give data.tokenizer= or "
            "model.pretrained= a folder or hub id of a diffusers pipeline"
        )
    texts = [caption for sample in samples for caption in sample.captions]
    return CaptionTokens(
        tokens=caption_fields(Source(path=tokenizer), texts, num_tokens),
        starts=tuple(accumulate((len(s.captions) for s in samples), initial=0)),
        seed=seed,
    )


def cut_captions(
    samples: Sequence[Sample], tokenizer: str, num_tokens: int | Sequence[int]
) -> Iterator[tuple[Sample, int]]:
    """Samples with a caption of more than the first tokenizer's `num_tokens`, and how many the
    longest one has.

    Raises:
        SpecError: The tokenizer cannot be loaded.
    """
    count, most = Source(path=tokenizer).load(AutoTokenizer, "tokenizer"), token_lengths(num_tokens)
    for sample in samples:
        longest = max(len(count(caption)["input_ids"]) for caption in sample.captions)
        if longest > most[0]:
            yield sample, longest


def labels_of(samples: Sequence[Sample], num_classes: int | None) -> Labels:
    """Labels as a tensor.

    Raises:
        DataError: A sample has no label, or one that is not below `num_classes`.
    """
    for sample in samples:
        if sample.label is None:
            raise DataError(f"{sample.path} has no label")
        if num_classes is not None and sample.label >= num_classes:
            raise DataError(
                f"{sample.path} has label {sample.label}, the model has {num_classes} classes "
                f"(0 to {num_classes - 1}); raise its num_embeds_ada_norm"
            )
    return Labels(labels=torch.tensor([sample.label for sample in samples], dtype=torch.int64))

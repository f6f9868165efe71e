"""Condition dropout: what trains the unconditional model that classifier-free guidance needs.

In:     a condition ``[batch, ...]`` and the draw keys int64 ``[batch, 2]``.
Out:    the condition, replaced per sample with the "no condition" value with the given probability.
Source: Ho & Salimans, arXiv 2207.12598.

Drawn once per sample, outside the trained layers: a model's own label dropout would draw once per
embedder and stage. Validation keys (batch below zero) drop nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import DRAW_KEY, FrozenComponent, Layer
from lightning_dpipe.objective.draws import uniform


def context_dropout(
    probability: float,
    *,
    seed: int,
    reads: str = "encoded",
    mask: str | None = None,
    scale: float = 1.0,
    writes: str = "context",
    name: str = "condition",
) -> FrozenComponent:
    """Drop encoded captions to zeros.

    Args:
        probability: Share of samples dropped, in ``[0, 1]``.
        seed: The run's seed.
        reads: Name of the encoded captions, ``[batch, tokens, width]``.
        mask: Name of an int64 ``[batch, tokens]`` mask; tokens with 0 are zeroed too, for backbones
            whose cross-attention takes no mask.
        scale: Factor on the encoded captions, as latents have one: states of about unit variance
            are learnt from sooner (MiniLM's have a deviation of 0.5, so 2).
        writes: Name of the result, ``[batch, tokens, width]``.
        name: The component's name.

    Raises:
        SpecError: `probability` is outside ``[0, 1]``.
    """
    drop = _Dropped(probability=probability, seed=seed, purpose="caption_dropout")

    def zero(encoded: Tensor, draw_key: Tensor) -> Tensor:
        dropped = drop(draw_key).to(encoded.device)
        return (encoded * scale).masked_fill(dropped[:, None, None], 0.0)

    def zero_masked(encoded: Tensor, mask: Tensor, draw_key: Tensor) -> Tensor:
        dropped = drop(draw_key).to(encoded.device)
        unread = (mask == 0).logical_or(dropped[:, None])[..., None]
        return (encoded * scale).masked_fill(unread, 0.0)

    if mask is None:
        return _component(name, zero, (reads, DRAW_KEY), (writes,))
    return _component(name, zero_masked, (reads, mask, DRAW_KEY), (writes,))


def caption_dropout(
    probability: float,
    *,
    seed: int,
    empty: Mapping[str, Sequence[int]],
    prefix: str = "caption_",
    name: str = "caption",
) -> FrozenComponent:
    """Drop captions to the empty one, before the text encoder (as Stable Diffusion trains).

    Args:
        probability: Share of samples dropped, in ``[0, 1]``.
        seed: The run's seed.
        empty: The empty caption by batch field (token ids, masks), padded as the others are; each
            field is read as int64 ``[batch, tokens]``.
        prefix: The result of field ``x`` is called ``prefix + x``.
        name: The component's name.

    Raises:
        SpecError: `probability` is outside ``[0, 1]``, or the fields differ in length.
    """
    lengths = {field: len(values) for field, values in empty.items()}
    if len(set(lengths.values())) != 1:
        raise SpecError(
            f"the empty caption's fields have lengths {lengths}; pass them as the tokenizer "
            "returns them, padded to the same length"
        )
    drop = _Dropped(probability=probability, seed=seed, purpose="caption_dropout")

    def replace(*fields: Tensor) -> Tensor | tuple[Tensor, ...]:
        *captions, draw_key = fields
        dropped = drop(draw_key).to(captions[0].device)[:, None]
        made = tuple(
            torch.where(dropped, torch.tensor(values, device=caption.device), caption)
            for caption, values in zip(captions, empty.values(), strict=True)
        )
        return made if len(made) > 1 else made[0]

    return _component(name, replace, (*empty, DRAW_KEY), tuple(prefix + field for field in empty))


def label_dropout(
    probability: float,
    *,
    seed: int,
    null_class: int,
    reads: str = "label",
    writes: str = "class_label",
    name: str = "label_dropout",
) -> FrozenComponent:
    """Drop class labels to the null class (DiT: the row after the last class).

    Args:
        probability: Share of samples dropped, in ``[0, 1]``.
        seed: The run's seed.
        null_class: The label that stands for "no class".
        reads: Name of the labels, int64 ``[batch]``.
        writes: Name of the result, int64 ``[batch]``.
        name: The component's name.

    Raises:
        SpecError: `probability` is outside ``[0, 1]``.
    """
    drop = _Dropped(probability=probability, seed=seed, purpose="label_dropout")

    def replace(label: Tensor, draw_key: Tensor) -> Tensor:
        return label.masked_fill(drop(draw_key).to(label.device), null_class)

    return _component(name, replace, (reads, DRAW_KEY), (writes,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dropped:
    """``draw_key -> bool [batch]``: which samples lose their condition."""

    probability: float
    seed: int
    purpose: str

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise SpecError(
                f"dropout probability is {self.probability}; expected a value in [0, 1]"
            )

    def __call__(self, draw_key: Tensor) -> Tensor:
        training = draw_key[:, 0] >= 0
        return training & (uniform(self.seed, self.purpose, draw_key) < self.probability)


def _component(
    name: str, drop: Callable[..., object], reads: tuple[str, ...], writes: tuple[str, ...]
) -> FrozenComponent:
    layer = Layer(name="drop", module=torch.no_grad()(drop), reads=reads, writes=writes)
    return FrozenComponent(name=name, layers=(layer,))

"""Conditions that no encoder makes: joined captions, image sizes, a guidance the model is told.

In:     encoded captions, images. Out: what transformers read, as frozen components without weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import FrozenComponent, Layer


def joined_captions(
    clips: Sequence[str],
    pooled: Sequence[str],
    t5: str,
    *,
    context: str = "context",
    writes_pooled: str = "pooled",
    name: str = "captions",
) -> FrozenComponent:
    """One text encoding of several, as SD3 reads them (arXiv 2403.03206, section 4).

    CLIP's states side by side, zeros up to T5's width, then T5's states as more words.

    Args:
        clips: Names of CLIP states ``[batch, words, width]``.
        pooled: Names of pooled CLIP states ``[batch, width]``, side by side too.
        t5: Name of T5's states ``[batch, words, width]``.
        context: Name of the joined states.
        writes_pooled: Name of the joined pooled states.
        name: The component's name.
    """

    @torch.no_grad()
    def join(*given: Tensor) -> tuple[Tensor, Tensor]:
        wide, words = torch.cat(given[: len(clips)], dim=-1), given[-1]
        missing = words.shape[-1] - wide.shape[-1]
        if missing < 0:
            raise SpecError(
                f"CLIP's states have a width of {wide.shape[-1]} together, T5's of "
                f"{words.shape[-1]}; choose encoders whose CLIP states are no wider"
            )
        states = torch.cat([pad(wide, (0, missing)), words], dim=-2)
        return states, torch.cat(given[len(clips) : -1], dim=-1)

    layer = Layer(
        name="join",
        module=join,
        reads=(*clips, *pooled, t5),
        writes=(context, writes_pooled),
    )
    return FrozenComponent(name=name, layers=(layer,))


def image_sizes(image: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width ``[batch, 2]`` and their ratio ``[batch, 1]`` of ``[batch, 3, h, w]``."""
    height, width = image.shape[-2:]
    sides = torch.tensor([height, width], dtype=torch.float32, device=image.device)
    ratio = torch.tensor([height / width], dtype=torch.float32, device=image.device)
    return sides.repeat(len(image), 1), ratio.repeat(len(image), 1)


def size_component(*, image: str = "image", name: str = "size") -> FrozenComponent:
    """Write ``resolution`` and ``aspect_ratio`` of `image` (PixArt at 1024 px)."""
    layer = Layer(
        name="size", module=image_sizes, reads=(image,), writes=("resolution", "aspect_ratio")
    )
    return FrozenComponent(name=name, layers=(layer,))


def constant_component(value: float, *, like: str, writes: str) -> FrozenComponent:
    """Write `value` for every sample, float32 ``[batch]``, where the tensor `like` is."""

    def full(tensor: Tensor) -> Tensor:
        return torch.full((len(tensor),), value, dtype=torch.float32, device=tensor.device)

    layer = Layer(name=writes, module=full, reads=(like,), writes=(writes,))
    return FrozenComponent(name=f"{writes}_value", layers=(layer,))

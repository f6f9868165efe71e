"""What the frozen text encoders of `transformers` share: their chain, what is refused, a trial.

In:     an encoder. Out: its layers ``embeddings | layer0 | layer1 | ...`` over the name ``h``, and
        a narrow copy of it to compare with the library.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.hooks import refuse_hooks
from lightning_dpipe.models.spec import Layer

MASKS = ("sdpa", "eager")
"""Attention kernels whose mask is a plain tensor."""


def text_chain(
    embeddings: nn.Module,
    blocks: Iterable[tuple[nn.Module, Callable[..., Tensor]]],
    input_ids: str,
    masks: tuple[str, ...] = (),
) -> tuple[Layer, ...]:
    """Embeddings of `input_ids`, then each block, given with the callable that runs it."""
    first = Layer(name="embeddings", module=embeddings, reads=(input_ids,), writes=("h",))
    others = (
        Layer(name=f"layer{i}", module=run, reads=("h", *masks), writes=("h",), owns=(block,))
        for i, (block, run) in enumerate(blocks)
    )
    return (first, *others)


def refuse_encoder(model: Any) -> None:
    """Refuse an encoder whose layers cannot be run one by one.

    Raises:
        UnsupportedError: An attention kernel other than sdpa or eager, or hooks.
    """
    kernel = model.config._attn_implementation
    if kernel not in MASKS:
        raise UnsupportedError(
            f"{type(model).__name__} uses attention kernel {kernel!r}; its layers can be run one "
            f"by one with {' or '.join(MASKS)}: pass attn_implementation= when loading it"
        )
    refuse_hooks({"the text encoder": model, "its encoder": model.encoder})


def encoder_key(model: Any) -> str:
    """Class, attention kernel and configuration."""
    config = model.config
    return f"{type(model).__qualname__} {config._attn_implementation} {config.to_json_string()}"


def narrow_encoder(model: Any, narrow: Mapping[str, int]) -> Any:
    """An encoder with the widths of `narrow` and the same flags, in eval mode without gradients."""
    config = type(model.config).from_dict({**model.config.to_dict(), **narrow})
    tiny = type(model)._from_config(
        config, attn_implementation=model.config._attn_implementation, dtype=torch.float32
    )
    return tiny.eval().requires_grad_(False)

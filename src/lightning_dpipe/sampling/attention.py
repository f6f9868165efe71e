"""Attention over keys and values of the whole image, of which a unit renews its own rows.

In:     the library's attention modules; a cursor that says which rows are at work.
Out:    processors that are put in through the library's setter and taken out on leaving.
Each computes what the library's own one does, to the bit when the unit is the whole image. Rows of
other patches are as old as their last visit: one step, or none. Keys and values of words are kept
from the step's first unit; later units bring no words, so that the text stream runs once a step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.sampling.parts import Site, SiteKind, View


@dataclass(slots=True, eq=False)
class Cursor:
    """What a rank is working at: shared by its processors, moved by the walker."""

    group: int = 0
    view: View | None = None

    @property
    def at(self) -> View:
        """The rows of the unit."""
        assert self.view is not None, "attention ran outside a unit"
        return self.view


class _Kept:
    """Keys and values of one attention module, by group of images."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def buffers(self, key: Tensor, length: int, dim: int) -> tuple[Tensor, Tensor]:
        """Tensors like `key`, with `length` tokens in dimension `dim`."""
        found = self.pairs.get(self.cursor.group)
        if found is None:
            shape = [*key.shape]
            shape[dim] = length
            found = self.pairs[self.cursor.group] = (key.new_zeros(shape), key.new_zeros(shape))
        return found


class RowsAttention(_Kept):
    """Self-attention of image tokens (DiT, PixArt; the second attention of SD3.5)."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend from the unit's tokens, ``[batch, tokens, dim]``, to all."""
        query, key, value = (
            _heads(attn, f(hidden_states)) for f in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = _normed(query, attn.norm_q), _normed(key, attn.norm_k)
        first, last = self.cursor.at.tokens
        # Kept as [batch, tokens, heads, dim], which is how the projections lie in memory.
        keys, values = self.buffers(key.transpose(1, 2), self.cursor.at.num_tokens, 1)
        keys[:, first:last] = key.transpose(1, 2)
        values[:, first:last] = value.transpose(1, 2)
        out = F.scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2))
        return _projected(attn, _tokens(out))


class CrossAttention(_Kept):
    """Attention to a caption that is the same in all steps: its keys and values are made once."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend from the unit's tokens to the caption's words."""
        assert encoder_hidden_states is not None
        pair = self.pairs.get(self.cursor.group)
        if pair is None:
            words = encoder_hidden_states
            if attn.norm_cross:
                words = attn.norm_encoder_hidden_states(words)
            key, value = _heads(attn, attn.to_k(words)), _heads(attn, attn.to_v(words))
            pair = self.pairs[self.cursor.group] = (_normed(key, attn.norm_k), value)
        if attention_mask is not None:
            batch, words_count = len(hidden_states), pair[0].shape[2]
            mask = attn.prepare_attention_mask(attention_mask, words_count, batch)
            attention_mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
        query = _normed(_heads(attn, attn.to_q(hidden_states)), attn.norm_q)
        out = F.scaled_dot_product_attention(query, *pair, attn_mask=attention_mask)
        return _projected(attn, _tokens(out))


class JointAttention(_Kept):
    """SD3's attention of two streams: tokens first, then words."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from the unit's tokens, and words if it has any, to all."""
        assert encoder_hidden_states is not None
        words = encoder_hidden_states
        query, key, value = (
            _heads(attn, f(hidden_states)) for f in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = _normed(query, attn.norm_q), _normed(key, attn.norm_k)
        count, view = key.shape[2], self.cursor.at
        first, last = view.tokens
        keys, values = self.buffers(key, view.num_tokens + view.words, 2)
        keys[:, :, first:last], values[:, :, first:last] = key, value
        if view.text:
            added = _normed(_heads(attn, attn.add_q_proj(words)), attn.norm_added_q)
            query = torch.cat([query, added], dim=2)
            keys[:, :, view.num_tokens :] = _normed(
                _heads(attn, attn.add_k_proj(words)), attn.norm_added_k
            )
            values[:, :, view.num_tokens :] = _heads(attn, attn.add_v_proj(words))
        out = _tokens(F.scaled_dot_product_attention(query, keys, values))
        tokens, words = out[:, :count], out[:, count:]
        if view.text and not attn.context_pre_only:
            words = attn.to_add_out(words)
        return _projected(attn, tokens, divide=False), words


class FluxAttention(_Kept):
    """Flux: words first, then tokens, both with rotary positions; one stream or two."""

    def __init__(self, cursor: Cursor, stock: Any) -> None:
        super().__init__(cursor)
        self.backend = stock._attention_backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from the unit's tokens, and words if it has any, to all."""
        words, view = encoder_hidden_states, self.cursor.at
        count = view.words if view.text else 0
        query, key, value = (
            f(hidden_states).unflatten(-1, (-1, attn.head_dim))
            for f in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if words is not None and count:
            projected = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            added_q, added_k, added_v = (
                f(words).unflatten(-1, (-1, attn.head_dim)) for f in projected
            )
            query = torch.cat([attn.norm_added_q(added_q), query], dim=1)
            key = torch.cat([attn.norm_added_k(added_k), key], dim=1)
            value = torch.cat([added_v, value], dim=1)
        query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
        key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        # A unit with words starts at the first row: words and tokens are one range.
        first, last = (view.words + token for token in view.tokens)
        keys, values = self.buffers(key, view.words + view.num_tokens, 1)
        keys[:, first - count : last], values[:, first - count : last] = key, value
        out: Tensor = dispatch_attention_fn(query, keys, values, backend=self.backend)
        out = out.flatten(2, 3).to(query.dtype)
        if words is None:
            return out
        tokens = attn.to_out[1](attn.to_out[0](out[:, count:].contiguous()))
        return tokens, attn.to_add_out(out[:, :count].contiguous())


_STOCK: dict[SiteKind, type] = {
    SiteKind.ROWS: AttnProcessor2_0,
    SiteKind.CROSS: AttnProcessor2_0,
    SiteKind.JOINT: JointAttnProcessor2_0,
    SiteKind.FLUX: FluxAttnProcessor,
}


@contextmanager
def row_attention(sites: Sequence[Site], cursor: Cursor) -> Iterator[None]:
    """Put row-wise processors into `sites`; the former ones are back on leaving, come what may.

    Raises:
        UnsupportedError: A site has another processor than the library's own, or is in use.
    """
    former = [(site.attention, _checked(site)) for site in sites]
    try:
        for site, (attention, stock) in zip(sites, former, strict=True):
            attention.set_processor(_make(site.kind, cursor, stock))
        yield
    finally:
        for attention, stock in former:
            attention.set_processor(stock)


def _make(kind: SiteKind, cursor: Cursor, stock: Any) -> Any:
    if kind is SiteKind.FLUX:
        return FluxAttention(cursor, stock)
    made = {
        SiteKind.ROWS: RowsAttention,
        SiteKind.CROSS: CrossAttention,
        SiteKind.JOINT: JointAttention,
    }
    return made[kind](cursor)


def _checked(site: Site) -> Any:
    attention, processor = site.attention, site.attention.processor
    if isinstance(processor, _Kept):
        raise UnsupportedError(
            "another sampling call with patches is at work in this model; let it end first, or "
            "sample from a copy"
        )
    stock = (_STOCK[site.kind], JointAttnProcessor2_0)  # SD3.5's second attention has the joint one
    if type(processor) not in stock or getattr(attention, "fused_projections", False):
        raise UnsupportedError(
            f"attention processor {type(processor).__name__}"
            f"{' with fused projections' if getattr(attention, 'fused_projections', False) else ''}"
            f" in a {type(attention).__name__}; patches work with {stock[0].__name__} only: reset "
            "the processors, or sample with mode='exact'"
        )
    return processor


def _heads(attn: Any, projected: Tensor) -> Tensor:
    """``[batch, tokens, heads * dim]`` to ``[batch, heads, tokens, dim]``."""
    width = projected.shape[-1] // attn.heads
    return projected.view(len(projected), -1, attn.heads, width).transpose(1, 2)


def _tokens(out: Tensor) -> Tensor:
    """``[batch, heads, tokens, dim]`` to ``[batch, tokens, heads * dim]``."""
    return out.transpose(1, 2).reshape(len(out), -1, out.shape[1] * out.shape[3])


def _normed(x: Tensor, norm: Any) -> Tensor:
    return x if norm is None else norm(x)


def _projected(attn: Any, out: Tensor, *, divide: bool = True) -> Tensor:
    out = attn.to_out[1](attn.to_out[0](out))
    return out / attn.rescale_output_factor if divide else out

"""Tokens of some rows of a latent: patch embedding with the positions of the whole image.

In:     rows of a latent ``[batch, channels, rows * patch, width]``, the view they are of.
Out:    tokens ``[batch, tokens, dim]``; a convolution whose stride is its kernel works on rows.
"""

from typing import Any

import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed
from torch import Tensor

from lightning_dpipe.models.patches import unpatchify
from lightning_dpipe.sampling.parts import View


class RowEmbed:
    """diffusers' ``PatchEmbed`` over rows; the whole image goes through the module itself.

    Positions of a grid are made once and live as long as this object.
    """

    def __init__(self, embed: Any) -> None:
        self.embed = embed
        self._positions: dict[tuple[int, int], Tensor] = {}

    def __call__(self, view: View, sample: Tensor, *extra: Tensor) -> Tensor:
        """Embed the latent's rows; `extra` are more channels."""
        embed = self.embed
        latent = torch.cat((sample, *extra), dim=1) if extra else sample
        if view.whole:
            whole: Tensor = embed(latent).contiguous()
            return whole
        tokens: Tensor = embed.proj(latent).flatten(2).transpose(1, 2)
        if embed.layer_norm:
            tokens = embed.norm(tokens)
        if embed.pos_embed is not None:
            first, last = view.tokens
            tokens = (tokens + self._of(view.grid, tokens.device)[:, first:last]).to(tokens.dtype)
        return tokens.contiguous()

    def _of(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        if grid not in self._positions:
            self._positions[grid] = self._make(grid, device)
        return self._positions[grid]

    def _make(self, grid: tuple[int, int], device: torch.device) -> Tensor:
        embed = self.embed
        if embed.pos_embed_max_size:
            made: Tensor = embed.cropped_pos_embed(*(n * embed.patch_size for n in grid))
            return made
        if (embed.height, embed.width) == grid:
            kept: Tensor = embed.pos_embed
            return kept
        fresh: Tensor = get_2d_sincos_pos_embed(
            embed_dim=embed.pos_embed.shape[-1],
            grid_size=grid,
            base_size=embed.base_size,
            interpolation_scale=embed.interpolation_scale,
            device=device,
            output_type="pt",
        )
        return fresh.float().unsqueeze(0)


def rows_of_image(view: View, tokens: Tensor, *, patch: int, channels: int) -> Tensor:
    """Image rows ``[batch, channels, rows * patch, width]`` of the head's tokens."""
    height, width = (view.last - view.first) * patch, view.grid[1] * patch
    size = tokens.new_empty(()).expand(1, 1, height, width)
    return unpatchify(tokens, size, patch=patch, channels=channels)

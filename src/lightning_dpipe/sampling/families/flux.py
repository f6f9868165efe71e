"""Flux by rows: every stage makes the rotary positions of its tokens once a call."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from lightning_dpipe.models.flux import PACK, pack, position_ids, unpack
from lightning_dpipe.models.spec import Backbone
from lightning_dpipe.sampling.families.sd3 import stream_values, with_words
from lightning_dpipe.sampling.parts import (
    Part,
    RowModel,
    Scope,
    SiteKind,
    View,
    row_layer,
    unit_part,
)

SOLVER_STEPS = 1000.0
"""Flux reads times in [0, 1]; solvers count to this."""


def flux_rows(backbone: Backbone, model: FluxTransformer2DModel) -> RowModel:
    """The layers of `flux_layers` by rows."""
    embed, *middle, head = backbone.layers
    sample, timestep, context, pooled, *more = embed.reads
    guides, extra = (more[:1], more[1:]) if model.config.guidance_embeds else ([], more)
    layers = [
        row_layer(
            embed,
            {
                Scope.CALL: unit_part(model.context_embedder, (context,), ("words",)),
                Scope.STEP: unit_part(_condition(model), (timestep, pooled, *guides), ("temb",)),
                Scope.UNIT: Part(
                    fn=with_words(_tokens(model)),
                    reads=("words", sample, *extra),
                    writes=("h", "c"),
                ),
            },
        )
    ]
    rotary = _Rotary(model.pos_embed)
    blocks = (*model.transformer_blocks, *model.single_transformer_blocks)
    for layer, block in zip(middle, blocks, strict=True):
        layers.append(
            row_layer(
                layer,
                {
                    Scope.UNIT: Part(
                        fn=_run(block, rotary), reads=("h", "c", "temb"), writes=("h", "c")
                    )
                },
                {"attn": SiteKind.FLUX},
            )
        )
    layers.append(
        row_layer(
            head, {Scope.UNIT: Part(fn=_head(model), reads=("h", "temb"), writes=head.writes)}
        )
    )
    return RowModel(
        layers=tuple(layers),
        values=stream_values(model.inner_dim),
        noisy=sample,
        timestep=timestep,
        out=head.writes[0],
        patch=PACK,
        dtype=model.proj_out.weight.dtype,
        context=context,
        timestep_scale=SOLVER_STEPS,
        estimate=extra[0] if extra else None,
        inputs=(context, pooled, *guides),
    )


class _Rotary:
    """Rotary embeddings of a view's words and tokens."""

    def __init__(self, embed: Any) -> None:
        self.embed = embed
        self._whole: dict[tuple[int, tuple[int, int]], tuple[Tensor, Tensor]] = {}

    def of(self, view: View, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (view.words, view.grid)
        if key not in self._whole:
            height, width = (n * PACK for n in view.grid)
            self._whole[key] = self.embed(position_ids(view.words, height, width, device))
        first, last = (view.words + token for token in view.tokens)
        cos, sin = self._whole[key]
        if view.text:  # a unit with words starts at the first row
            first = 0
        return cos[first:last], sin[first:last]


def _run(block: Any, rotary: _Rotary) -> Any:
    def run(view: View, h: Tensor, c: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        c, h = block(
            hidden_states=h,
            encoder_hidden_states=c,
            temb=temb,
            image_rotary_emb=rotary.of(view, h.device),
        )
        return h, c

    return run


def _condition(model: Any) -> Any:
    dtype = model.proj_out.weight.dtype

    def condition(timestep: Tensor, pooled: Tensor, *guides: Tensor) -> Tensor:
        times = [t.to(dtype) * 1000 for t in (timestep, *guides)]
        made: Tensor = model.time_text_embed(*times, pooled)
        return made

    return condition


def _tokens(model: Any) -> Any:
    def tokens(view: View, sample: Tensor, *extra: Tensor) -> Tensor:
        made: Tensor = model.x_embedder(
            pack(torch.cat((sample, *extra), dim=1) if extra else sample)
        )
        return made

    return tokens


def _head(model: Any) -> Any:
    def head(view: View, h: Tensor, temb: Tensor) -> Tensor:
        height, width = (view.last - view.first) * PACK, view.grid[1] * PACK
        return unpack(model.proj_out(model.norm_out(h, temb)), height, width)

    return head

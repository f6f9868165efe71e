"""PixArt by rows: the caption is projected once a call, times are embedded once a step."""

from typing import Any

from diffusers import PixArtTransformer2DModel
from torch import Tensor

from lightning_dpipe.models.spec import Backbone
from lightning_dpipe.sampling.parts import (
    Along,
    Part,
    RowModel,
    Scope,
    SiteKind,
    Value,
    View,
    row_layer,
    unit_part,
)
from lightning_dpipe.sampling.tokens import RowEmbed, rows_of_image


def pixart_rows(backbone: Backbone, model: PixArtTransformer2DModel) -> RowModel:
    """The layers of `pixart_layers` by rows."""
    embed, *middle, head = backbone.layers
    sizes = embed.reads[2:4] if model.use_additional_conditions else ()
    sample, timestep, *more = embed.reads
    extra = more[len(sizes) :]
    dim = model.inner_dim
    layers = [
        row_layer(
            embed,
            {
                Scope.STEP: unit_part(_condition(model), (timestep, *sizes), ("temb6", "emb")),
                Scope.UNIT: Part(
                    fn=RowEmbed(model.pos_embed), reads=(sample, *extra), writes=("h",)
                ),
            },
        )
    ]
    context = middle[-1].reads[1]
    if model.caption_projection is not None:
        caption, *middle = middle
        context = caption.reads[0]
        layers.append(
            row_layer(
                caption,
                {Scope.CALL: unit_part(model.caption_projection, caption.reads, caption.writes)},
            )
        )
    for layer in middle:
        layers.append(
            row_layer(
                layer,
                {Scope.UNIT: unit_part(layer.module, layer.reads, layer.writes)},
                {"attn1": SiteKind.ROWS, "attn2": SiteKind.CROSS},
            )
        )
    layers.append(
        row_layer(head, {Scope.UNIT: Part(fn=_head(model), reads=("h", "emb"), writes=head.writes)})
    )
    return RowModel(
        layers=tuple(layers),
        values={
            "h": Value(scope=Scope.UNIT, along=Along.TOKENS, widths=(dim,)),
            "ctx": Value(scope=Scope.CALL, along=Along.WORDS, widths=(dim,)),
            "temb6": Value(scope=Scope.STEP, along=Along.NOTHING, widths=(6 * dim,)),
            "emb": Value(scope=Scope.STEP, along=Along.NOTHING, widths=(dim,)),
        },
        noisy=sample,
        timestep=timestep,
        out=head.writes[0],
        patch=model.config.patch_size,
        dtype=model.proj_out.weight.dtype,
        context=context,
        estimate=extra[0] if extra else None,
        inputs=(context, *sizes, *middle[0].reads[3:]),
    )


def _condition(model: Any) -> Any:
    dtype = model.proj_out.weight.dtype

    def condition(timestep: Tensor, *sizes: Tensor) -> tuple[Tensor, Tensor]:
        resolution, aspect_ratio = sizes or (None, None)
        added = {"resolution": resolution, "aspect_ratio": aspect_ratio}
        temb6, emb = model.adaln_single(
            timestep, added, batch_size=len(timestep), hidden_dtype=dtype
        )
        return temb6, emb

    return condition


def _head(model: Any) -> Any:
    def head(view: View, h: Tensor, emb: Tensor) -> Tensor:
        shift, scale = (model.scale_shift_table[None] + emb[:, None]).chunk(2, dim=1)
        tokens = model.proj_out(model.norm_out(h) * (1 + scale) + shift)
        return rows_of_image(
            view, tokens, patch=model.config.patch_size, channels=model.out_channels
        )

    return head

"""SD3 and SD3.5 by rows: words enter once a call and go along with a step's first unit only."""

from typing import Any

from diffusers import SD3Transformer2DModel
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


def sd3_rows(backbone: Backbone, model: SD3Transformer2DModel) -> RowModel:
    """The layers of `sd3_layers` by rows."""
    embed, *middle, head = backbone.layers
    sample, timestep, context, pooled, *extra = embed.reads
    dim = model.inner_dim
    layers = [
        row_layer(
            embed,
            {
                Scope.CALL: unit_part(model.context_embedder, (context,), ("words",)),
                Scope.STEP: unit_part(model.time_text_embed, (timestep, pooled), ("temb",)),
                Scope.UNIT: Part(
                    fn=with_words(RowEmbed(model.pos_embed)),
                    reads=("words", sample, *extra),
                    writes=("h", "c"),
                ),
            },
        )
    ]
    for layer in middle:
        layers.append(
            row_layer(
                layer,
                {Scope.UNIT: unit_part(layer.module, layer.reads, layer.writes)},
                {"attn": SiteKind.JOINT, "attn2": SiteKind.ROWS},
            )
        )
    layers.append(
        row_layer(
            head, {Scope.UNIT: Part(fn=_head(model), reads=("h", "temb"), writes=head.writes)}
        )
    )
    return RowModel(
        layers=tuple(layers),
        values=stream_values(dim),
        noisy=sample,
        timestep=timestep,
        out=head.writes[0],
        patch=model.config.patch_size,
        dtype=model.proj_out.weight.dtype,
        context=context,
        estimate=extra[0] if extra else None,
        inputs=(context, pooled),
    )


def stream_values(dim: int) -> dict[str, Value]:
    """What two-stream transformers write."""
    return {
        "words": Value(scope=Scope.CALL, along=Along.WORDS, widths=(dim,)),
        "temb": Value(scope=Scope.STEP, along=Along.NOTHING, widths=(dim,)),
        "h": Value(scope=Scope.UNIT, along=Along.TOKENS, widths=(dim,)),
        "c": Value(scope=Scope.UNIT, along=Along.TEXT, widths=(dim,)),
    }


def with_words(embed: Any) -> Any:
    """Embed the unit's rows; words come along if the unit has them."""

    def both(view: View, words: Tensor, sample: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        return embed(view, sample, *extra), words if view.text else words[:, :0]

    return both


def _head(model: Any) -> Any:
    def head(view: View, h: Tensor, temb: Tensor) -> Tensor:
        tokens = model.proj_out(model.norm_out(h, temb))
        return rows_of_image(
            view, tokens, patch=model.config.patch_size, channels=model.out_channels
        )

    return head

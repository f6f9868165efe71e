"""DiT by rows. Blocks embed timestep and label themselves, a few kilobytes of work each."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel
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


def dit_rows(backbone: Backbone, model: DiTTransformer2DModel) -> RowModel:
    """The layers of `dit_layers` by rows; the pipeline's guided batch has the labels first."""
    embed, block0, *_, head = backbone.layers
    sample, *extra = embed.reads
    _, timestep, label = block0.reads
    dim = model.inner_dim
    layers = [
        row_layer(
            embed,
            {Scope.UNIT: Part(fn=RowEmbed(model.pos_embed), reads=(sample, *extra), writes=("h",))},
        )
    ]
    for layer, block in zip(backbone.layers[1:-1], model.transformer_blocks, strict=True):
        parts = {Scope.UNIT: unit_part(_run(block), ("h", timestep, label), ("h",))}
        if layer is block0:
            parts[Scope.STEP] = unit_part(_condition(block), (timestep, label), ("cond",))
        layers.append(row_layer(layer, parts, {"attn1": SiteKind.ROWS}))
    layers.append(
        row_layer(
            head, {Scope.UNIT: Part(fn=_head(model), reads=("h", "cond"), writes=head.writes)}
        )
    )
    return RowModel(
        layers=tuple(layers),
        values={
            "h": Value(scope=Scope.UNIT, along=Along.TOKENS, widths=(dim,)),
            "cond": Value(scope=Scope.STEP, along=Along.NOTHING, widths=(dim,)),
        },
        noisy=sample,
        timestep=timestep,
        out=head.writes[0],
        patch=model.patch_size,
        dtype=model.proj_out_2.weight.dtype,
        unconditional_first=False,
        estimate=extra[0] if extra else None,
        inputs=(label,),
        square=True,
    )


def _run(block: Any) -> Any:
    def run(h: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        made: Tensor = block(h, timestep=timestep, class_labels=label)
        return made

    return run


def _condition(block: Any) -> Any:
    dtype = block.attn1.to_q.weight.dtype

    def condition(timestep: Tensor, label: Tensor) -> Tensor:
        made: Tensor = block.norm1.emb(timestep, label, hidden_dtype=dtype)
        return made

    return condition


def _head(model: Any) -> Any:
    def head(view: View, h: Tensor, cond: Tensor) -> Tensor:
        shift, scale = model.proj_out_1(F.silu(cond)).chunk(2, dim=1)
        h = model.norm_out(h) * (1 + scale[:, None]) + shift[:, None]
        tokens: torch.Tensor = model.proj_out_2(h)
        return rows_of_image(view, tokens, patch=model.patch_size, channels=model.out_channels)

    return head

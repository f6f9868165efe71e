"""From what a user has to the row model that sampling runs.

In:     a module with a spec, one of its backbones, or a diffusers transformer.
Out:    its `RowModel`, with the layers of the training backbone in their order.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.dit import dit_backbone
from lightning_dpipe.models.flux import flux_backbone
from lightning_dpipe.models.pixart import pixart_backbone
from lightning_dpipe.models.sd3 import sd3_backbone
from lightning_dpipe.models.spec import Backbone, PipelineSpec
from lightning_dpipe.sampling.families.dit import dit_rows
from lightning_dpipe.sampling.families.flux import flux_rows
from lightning_dpipe.sampling.families.pixart import pixart_rows
from lightning_dpipe.sampling.families.sd3 import sd3_rows
from lightning_dpipe.sampling.parts import RowModel
from lightning_dpipe.sampling.plan import even_stages


@runtime_checkable
class HasSpec(Protocol):
    """What sampling needs of a module."""

    @property
    def spec(self) -> PipelineSpec:
        """Layers over named tensors, with one backbone."""


Source = HasSpec | Backbone | nn.Module
"""What can be sampled: see `backbone_of`."""

_FAMILIES = "DiT, PixArt, SD3 and Flux"


def backbone_of(source: Source, conditions: Mapping[str, Tensor]) -> Backbone:
    """The backbone of a module, itself, or the layers of a diffusers transformer.

    A transformer reads its conditions under the names that its layer list has by default; PixArt's
    words are masked if a ``mask`` is among the conditions.

    Raises:
        SpecError: The module has several backbones.
        UnsupportedError: The transformer is of no known family.
    """
    if isinstance(source, Backbone):
        return source
    if isinstance(source, HasSpec):
        backbones = source.spec.backbones
        if len(backbones) != 1:
            raise SpecError(
                f"{type(source).__name__} has {len(backbones)} backbones; pass the one to sample "
                f"from: {', '.join(b.name for b in backbones)}"
            )
        return backbones[0]
    if isinstance(source, PixArtTransformer2DModel):
        return pixart_backbone(source, mask="mask" if "mask" in conditions else None)
    if isinstance(source, DiTTransformer2DModel):
        return dit_backbone(source)
    if isinstance(source, SD3Transformer2DModel):
        return sd3_backbone(source)
    if isinstance(source, FluxTransformer2DModel):
        return flux_backbone(source)
    raise UnsupportedError(
        f"{type(source).__name__} cannot be sampled over stages; {_FAMILIES} can"
    )


def row_model(backbone: Backbone, conditions: Mapping[str, Tensor]) -> RowModel:
    """The backbone's layers by rows.

    Raises:
        SpecError: A condition is missing.
        UnsupportedError: The backbone is of no known family, or was not made by one of their files.
    """
    model = backbone.model
    if isinstance(model, DiTTransformer2DModel):
        made = dit_rows(backbone, model)
    elif isinstance(model, PixArtTransformer2DModel):
        made = pixart_rows(backbone, model)
    elif isinstance(model, SD3Transformer2DModel):
        made = sd3_rows(backbone, model)
    elif isinstance(model, FluxTransformer2DModel):
        made = flux_rows(backbone, model)
    else:
        raise UnsupportedError(
            f"backbone {backbone.name!r} cannot be sampled over stages; {_FAMILIES} can, if their "
            "layers come from lightning_dpipe.models. Skips of a U-Net would travel with every "
            "patch: sample it in one process"
        )
    missing = [name for name in made.inputs if name not in conditions]
    if missing:
        raise SpecError(
            f"backbone {backbone.name!r} reads {', '.join(missing)}, which the conditions "
            f"({', '.join(conditions) or 'none'}) lack; add what is missing"
        )
    return made


def balanced_stages(
    source: Source, conditions: Mapping[str, Tensor], num_stages: int
) -> tuple[tuple[int, int], ...]:
    """Layer ranges for those who have no training plan: as many blocks a stage as can be.

    Raises:
        PlanError: There are fewer layers than stages.
        SpecError, UnsupportedError: See `row_model`.
    """
    return even_stages(row_model(backbone_of(source, conditions), conditions).weights(), num_stages)

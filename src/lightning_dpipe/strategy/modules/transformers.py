"""Transformers on latents: DiT (class labels), PixArt, SD3 and SD3.5, Flux (captions).

In, out: see `latent` and `captioned`; a DiT reads label int64 ``[batch]`` instead of captions.
Source: Peebles & Xie, arXiv 2212.09748; Chen et al., arXiv 2310.00426; Esser et al., arXiv
        2403.03206; flow models are trained on velocities, with logit-normal timesteps.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import (
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from lightning_dpipe.models.dit import dit_backbone
from lightning_dpipe.models.encoders import TextKind, TextPart
from lightning_dpipe.models.flux import PACK, flux_backbone
from lightning_dpipe.models.pixart import pixart_backbone
from lightning_dpipe.models.sd3 import sd3_backbone
from lightning_dpipe.models.spec import Backbone, Field, FrozenComponent
from lightning_dpipe.objective.conditions import (
    constant_component,
    image_sizes,
    joined_captions,
    size_component,
)
from lightning_dpipe.objective.dropout import label_dropout
from lightning_dpipe.sampling.simple import Guidance
from lightning_dpipe.strategy.modules.captioned import DROPPED, CaptionedModule
from lightning_dpipe.strategy.modules.latent import LatentModule


class LatentDiT(LatentModule):
    """A DiT with class labels; a learned variance is not trained.

    Args:
        label_dropout: Share of samples trained without their label, for guidance.
        options: See `LatentModule`; `num_embeds_ada_norm` of ``transformer=`` is the number of
            classes.
    """

    kind = DiTTransformer2DModel
    transformer: Any

    def __init__(self, *, label_dropout: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.label_dropout = label_dropout

    @property
    def null_class(self) -> int:
        """The label that stands for "no class": the one after the last."""
        return int(self.transformer.config.num_embeds_ada_norm)

    def condition_inputs(self) -> dict[str, Field]:
        """The label."""
        return {"label": Field(shape=(), dtype=torch.int64)}

    def conditioning(self) -> tuple[FrozenComponent, ...]:
        """Label dropout."""
        return (label_dropout(self.label_dropout, seed=self.seed, null_class=self.null_class),)

    def unconditional(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The null class for every sample."""
        return {name: torch.full_like(label, self.null_class) for name, label in fields.items()}

    def backbone(self, self_cond: str | None) -> Backbone:
        """The transformer, cut at its blocks."""
        return dit_backbone(
            self.transformer, sample="noisy", label="class_label", self_cond=self_cond
        )


class PixArt(CaptionedModule):
    """PixArt-alpha: T5 captions, padding masked; a learned variance is not trained."""

    kind = PixArtTransformer2DModel
    texts = (TextPart(kind=TextKind.T5, context="context", masked=True),)
    transformer: Any

    def backbone(self, self_cond: str | None) -> Backbone:
        """The transformer, cut at its blocks."""
        return pixart_backbone(
            self.transformer, sample="noisy", mask=f"{DROPPED}attention_mask", self_cond=self_cond
        )

    def conditioning(self) -> tuple[FrozenComponent, ...]:
        """For a 1024 px model also the image's size."""
        made = super().conditioning()
        return (*made, size_component()) if self.transformer.use_additional_conditions else made

    def more_conditions(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The size of what is drawn."""
        if not self.transformer.use_additional_conditions:
            return {}
        side, (count, *_) = self.config.image_size, fields["input_ids"].shape
        resolution, aspect_ratio = image_sizes(
            torch.empty(count, 3, side, side, device=self.device)
        )
        return {"resolution": resolution, "aspect_ratio": aspect_ratio}

    def to_pipeline(self) -> PixArtAlphaPipeline | None:
        """diffusers' pipeline, if there is a tokenizer and the model reads no estimate."""
        source = self.config.pipeline_source
        if source is None or self.config.self_conditioning is not None:
            return None
        return PixArtAlphaPipeline(transformer=self.transformer, **self.pipeline_parts(source))


class StableDiffusion3(CaptionedModule):
    """SD3 and SD3.5: two CLIP encoders side by side, then T5, one sequence; both pooled states."""

    kind = SD3Transformer2DModel
    scheduler_kind = FlowMatchEulerDiscreteScheduler
    texts = (
        *(
            TextPart(
                kind=TextKind.CLIP_PROJECTED,
                place=place,
                context=f"clip_{place}",
                pooled=f"clip_pooled_{place}",
                penultimate=True,
            )
            for place in (1, 2)
        ),
        TextPart(kind=TextKind.T5, place=3, context="t5"),
    )
    transformer: Any

    def conditioning(self) -> tuple[FrozenComponent, ...]:
        """The encoders, then their states as one."""
        clips = [part for part in self.texts if part.pooled is not None]
        joined = joined_captions(
            [part.context or "" for part in clips], [part.pooled or "" for part in clips], "t5"
        )
        return (*super().conditioning(), joined)

    def backbone(self, self_cond: str | None) -> Backbone:
        """The transformer, cut at its joint blocks."""
        return sd3_backbone(self.transformer, sample="noisy", self_cond=self_cond)

    def to_pipeline(self) -> StableDiffusion3Pipeline | None:
        """diffusers' pipeline, if there are tokenizers and the model reads no estimate."""
        source = self.config.source
        if source is None or self.config.self_conditioning is not None:
            return None
        return StableDiffusion3Pipeline(transformer=self.transformer, **self.pipeline_parts(source))


class Flux(CaptionedModule):
    """Flux: T5 captions and CLIP's pooled state.

    Args:
        guidance_scale: What a guidance-distilled model is told in training. Guidance of samples
            goes there too: they are drawn with one forward a step.
        caption_dropout: As elsewhere; 0 unless told otherwise, since nothing is guided by it.
        options: See `CaptionedModule`.
    """

    kind = FluxTransformer2DModel
    scheduler_kind = FlowMatchEulerDiscreteScheduler
    patch = PACK
    texts = (
        TextPart(kind=TextKind.CLIP, pooled="pooled"),
        TextPart(kind=TextKind.T5, place=2, context="context"),
    )
    transformer: Any

    def __init__(
        self, *, guidance_scale: float = 3.5, caption_dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__(caption_dropout=caption_dropout, **options)
        self.guidance_scale = guidance_scale

    def conditioning(self) -> tuple[FrozenComponent, ...]:
        """A distilled model also reads its guidance."""
        made = super().conditioning()
        if not self.transformer.config.guidance_embeds:
            return made
        return (*made, constant_component(self.guidance_scale, like="pooled", writes="guidance"))

    def backbone(self, self_cond: str | None) -> Backbone:
        """The transformer, cut at its double and single blocks."""
        return flux_backbone(
            self.transformer,
            sample="noisy",
            self_cond=self_cond,
            num_timesteps=self.schedule.num_steps,
        )

    def guided(
        self, conditions: dict[str, Tensor], given: Mapping[str, Tensor], scale: float
    ) -> tuple[dict[str, Tensor], Guidance | None]:
        """The scale is told, if the model asks for it."""
        if "guidance" not in conditions:
            return conditions, None
        return {**conditions, "guidance": torch.full_like(conditions["guidance"], scale)}, None

    def timetable(self, num_steps: int) -> dict[str, Any]:
        """As FluxPipeline: from pure noise in equal steps, then shifted."""
        sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
        return {"sigmas": sigmas, **super().timetable(num_steps)}

    def to_pipeline(self) -> FluxPipeline | None:
        """diffusers' pipeline, if there are tokenizers."""
        source = self.config.source
        if source is None:
            return None
        return FluxPipeline(transformer=self.transformer, **self.pipeline_parts(source))

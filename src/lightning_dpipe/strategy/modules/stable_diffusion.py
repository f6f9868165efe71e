"""Stable Diffusion 1.5 and 2.1: the U-Net is trained, everything before it runs ahead.

In, out: see `captioned`.
Source: Rombach et al., arXiv 2112.10752.
"""

from typing import Any

from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from lightning_dpipe.models.spec import Backbone
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.strategy.modules.captioned import CaptionedModule

UNCHECKED: dict[str, Any] = {
    "safety_checker": None,
    "feature_extractor": None,
    "requires_safety_checker": False,
}
"""Parts that Stable Diffusion's pipelines may be without."""


class StableDiffusion(CaptionedModule):
    """A latent U-Net (``unet=``) with CLIP captions; see `CaptionedModule` for the arguments."""

    kind = UNet2DConditionModel
    part = "unet"
    unet: Any

    def backbone(self, self_cond: str | None) -> Backbone:
        """The U-Net, cut at its layers."""
        return unet_backbone(self.unet, sample="noisy", self_cond=self_cond)

    def to_pipeline(self) -> StableDiffusionPipeline | None:
        """diffusers' pipeline, if there is a tokenizer and the U-Net reads no estimate."""
        source = self.config.source
        if source is None or self.config.self_conditioning is not None:
            return None
        return StableDiffusionPipeline(unet=self.unet, **self.pipeline_parts(source), **UNCHECKED)

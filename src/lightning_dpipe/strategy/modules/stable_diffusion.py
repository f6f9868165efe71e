"""Stable Diffusion 1.5 and 2.1: the U-Net is trained, everything before it runs ahead.

In, out: see `captioned`.
Source: Rombach et al., arXiv 2112.10752.
"""

from typing import Any

from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.lora import LoRA, add_lora
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

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lora = LoRA.of(self.config.lora)
        if self.lora is not None and self.config.self_conditioning is not None:
            raise UnsupportedError(
                f"self_conditioning={self.config.self_conditioning} with lora: the new input "
                "channels would have to be trained, but only adapters are; use null for one"
            )

    def build_backbone(self) -> None:
        """The U-Net, with adapters if they are what is trained."""
        super().build_backbone()
        if self.lora is not None:
            add_lora(self.unet, self.lora)

    def backbone(self, self_cond: str | None) -> Backbone:
        """The U-Net, cut at its layers."""
        return unet_backbone(self.unet, sample="noisy", self_cond=self_cond)

    def to_pipeline(self) -> StableDiffusionPipeline | None:
        """diffusers' pipeline, if there is a tokenizer and the U-Net reads no estimate."""
        source = self.config.pipeline_source
        if source is None or self.config.self_conditioning is not None:
            return None
        return StableDiffusionPipeline(unet=self.unet, **self.pipeline_parts(source), **UNCHECKED)

"""Stable Diffusion 1.5 and 2.1: the U-Net is trained, everything before it runs ahead.

In, out: see `latent`.
Source: Rombach et al., arXiv 2112.10752.
"""

from collections.abc import Mapping
from typing import Any

from diffusers import StableDiffusionPipeline, UNet2DConditionModel

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.lora import LoRA, add_lora
from lightning_dpipe.models.parts import diffusers_part
from lightning_dpipe.models.spec import Loss, PipelineSpec
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.strategy.modules.latent import LatentConfig, LatentModule


class StableDiffusion(LatentModule):
    """A latent U-Net with CLIP captions.

    Args:
        unet: Arguments of diffusers' ``UNet2DConditionModel``; not read with ``pretrained``.
        seed: Key of all draws; see `DiffusionModule`.
        options: Fields of `LatentConfig`.

    Raises:
        UnsupportedError: Self-conditioning and LoRA are asked for together.
    """

    def __init__(
        self, *, unet: Mapping[str, Any] | None = None, seed: int | None = None, **options: Any
    ) -> None:
        super().__init__(LatentConfig(**options), seed=seed)
        self.unet_config = unet
        self.lora = LoRA.of(self.config.lora)
        if self.lora is not None and self.config.self_conditioning is not None:
            raise UnsupportedError(
                f"self_conditioning={self.config.self_conditioning} with lora: the new input "
                "channels would have to be trained, but only adapters are; use null for one"
            )

    def configure_model(self) -> None:
        """Load or build encoders and U-Net."""
        if hasattr(self, "unet"):
            return
        self.build_encoders()
        self.unet = diffusers_part(
            UNet2DConditionModel, self.unet_config, self.config.source, "unet"
        )
        self.widen_for_estimate(self.unet)
        if self.lora is not None:
            add_lora(self.unet, self.lora)

    def pipeline_spec(self) -> PipelineSpec:
        """The U-Net is cut at its layers."""
        estimate = self.estimate()
        reads = None if estimate is None else estimate.writes
        return PipelineSpec(
            inputs=self.inputs(),
            frozen=self.encoders(),
            backbones=(unet_backbone(self.unet, sample="noisy", self_cond=reads),),
            loss=Loss(fn=weighted_mse, reads=("out", "target", "weight")),
            self_conditioning=estimate,
            shapes=self.shapes({"image": 3}),
        )

    def to_pipeline(self) -> StableDiffusionPipeline | None:
        """diffusers' pipeline, if there is a tokenizer and the U-Net reads no estimate."""
        source = self.config.source
        if source is None or not source.has_tokenizer or self.config.self_conditioning is not None:
            return None
        return StableDiffusionPipeline(unet=self.unet, **self.pipeline_parts(source))

"""ControlNet: a trained copy of a locked U-Net's encoder reads a hint image.

In:     as `captioned`, and hint float32 ``[batch, channels, size, size]`` in ``[0, 1]``.
Out:    images of a caption and a hint. The locked encoder reads the noisy latent only, so it runs
        ahead with the other encoders; the locked decoder passes gradients on.
Source: Zhang et al., arXiv 2302.05543.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, UNet2DConditionModel
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.controlnet import ControlledUNet, controlnet_components
from lightning_dpipe.models.spec import Field, PipelineSpec
from lightning_dpipe.strategy.modules.captioned import CaptionedModule
from lightning_dpipe.strategy.modules.latent import LOSS
from lightning_dpipe.strategy.modules.stable_diffusion import UNCHECKED


class ControlNet(CaptionedModule):
    """A ControlNet on a locked Stable Diffusion (``unet=``).

    Args:
        controlnet: Arguments of ``ControlNetModel``; None copies the U-Net's encoder, as the paper
            does.
        options: See `CaptionedModule`.

    Raises:
        UnsupportedError: Self-conditioning is asked for (the locked U-Net was trained without), or
            LoRA.
    """

    kind = UNet2DConditionModel
    part = "unet"

    def __init__(self, *, controlnet: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        if self.config.self_conditioning is not None:
            raise UnsupportedError(
                f"self_conditioning={self.config.self_conditioning} for a ControlNet: the locked "
                "U-Net does not read an estimate; use null"
            )
        if self.config.lora is not None:
            raise UnsupportedError("lora for a ControlNet: all of the copy is trained; use null")
        self.controlnet_config = controlnet

    def build_backbone(self) -> None:
        """The locked U-Net and its trained copy."""
        super().build_backbone()
        source = self.config.source
        if source is not None and source.has("controlnet"):
            self.controlnet = source.load(ControlNetModel, "controlnet", self.controlnet_config)
        elif self.controlnet_config is None:
            self.controlnet = ControlNetModel.from_unet(self.unet)
        else:
            self.controlnet = ControlNetModel(**self.controlnet_config)

    def pipeline_spec(self) -> PipelineSpec:
        """The locked encoder is frozen work; the backbone is the copy and the locked decoder."""
        size = self.config.image_size
        channels = self.controlnet.config.conditioning_channels
        locked, backbone = controlnet_components(self.controlnet, self.unet, sample="noisy")
        return PipelineSpec(
            inputs={**self.inputs(), "hint": Field(shape=(channels, size, size))},
            frozen=(*self.encoders(), locked),
            backbones=(backbone,),
            loss=LOSS,
            shapes=self.shapes({"image": 3, "hint": channels}),
        )

    def denoiser(self) -> Any:
        """Both models, with the library's own forwards."""
        whole = ControlledUNet(self.controlnet, self.unet)

        @torch.no_grad()
        def denoise(tensors: Mapping[str, Tensor]) -> Tensor:
            out: Tensor = whole(
                tensors["noisy"], tensors["timestep"], tensors["context"], tensors["hint"]
            )
            return out

        return denoise

    def more_conditions(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The hint, for both branches of guidance."""
        return {"hint": fields["hint"].to(self.device)}

    def to_pipeline(self) -> StableDiffusionControlNetPipeline | None:
        """diffusers' pipeline, if there is a tokenizer."""
        source = self.config.pipeline_source
        if source is None:
            return None
        return StableDiffusionControlNetPipeline(
            unet=self.unet,
            controlnet=self.controlnet,
            **self.pipeline_parts(source),
            **UNCHECKED,
        )

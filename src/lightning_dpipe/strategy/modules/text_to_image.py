"""Text-to-image diffusion on pixels: an SD-shaped U-Net that reads a frozen text encoder.

In:     image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``; input_ids and attention_mask int64
        ``[batch, tokens]``.
Out:    images of a caption. Text encoder, pixel unshuffle, caption dropout and noise are frozen
        work: they run ahead, in the bubbles.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_dpipe.models.spec import Field, FrozenComponent, Loss, PipelineSpec
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.pixels import pixel_latents
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.sampling.simple import Guidance, SampleRequest, backbone_denoiser, sample
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.modules.captions import (
    TextSource,
    bert_part,
    caption_components,
    caption_fields,
    encode_captions,
)
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig


class TextToImage(DiffusionModule):
    """A U-Net on small images and captions.

    Args:
        unet: Arguments of diffusers' ``UNet2DConditionModel``; ``in_channels`` is
            ``3 * unshuffle ** 2``.
        scheduler: A diffusers scheduler: noise, timesteps and what the model predicts.
        optimizer: AdamW and its schedule.
        image_size: Side of the images in pixels.
        num_tokens: Length that captions are padded to.
        text: The frozen encoder; see `TextSource`.
        unshuffle: Pixels per side that become channels; the U-Net works at ``size / unshuffle``.
        caption_dropout: Share of samples trained without their caption, for guidance.
        context_scale: Factor on the encoded captions; see `context_dropout`.
        min_snr_gamma: Weigh losses by min-SNR; None weighs all alike.
        seed: Key of all draws; see `DiffusionModule`.
    """

    def __init__(
        self,
        *,
        unet: Mapping[str, Any],
        scheduler: Any,
        optimizer: AdamWConfig,
        image_size: int = 32,
        num_tokens: int = 16,
        text: TextSource = None,
        unshuffle: int = 2,
        caption_dropout: float = 0.1,
        context_scale: float = 1.0,
        min_snr_gamma: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed=seed)
        self.unet_config = dict(unet)
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.image_size = image_size
        self.num_tokens = num_tokens
        self.text_source = text
        self.unshuffle = unshuffle
        self.caption_dropout = caption_dropout
        self.context_scale = context_scale
        self.min_snr_gamma = min_snr_gamma

    def configure_model(self) -> None:
        """Build the U-Net and load the text encoder."""
        if hasattr(self, "unet"):
            return
        self.unet = UNet2DConditionModel(**self.unet_config)
        self.text = bert_part(self.text_source)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """``(channels, side, side)`` of what the U-Net works on."""
        side = self.image_size // self.unshuffle
        return (3 * self.unshuffle**2, side, side)

    def pipeline_spec(self) -> PipelineSpec:
        """Everything up to the U-Net's inputs is frozen; the U-Net is cut at its layers."""
        return PipelineSpec(
            inputs={
                "image": Field(shape=(3, self.image_size, self.image_size)),
                **caption_fields(self.num_tokens),
            },
            frozen=(
                *self._captions(),
                pixel_latents(self.unshuffle),
                noise_component(
                    NoiseSchedule.from_scheduler(self.scheduler),
                    seed=self.seed,
                    min_snr_gamma=self.min_snr_gamma,
                ),
            ),
            backbones=(unet_backbone(self.unet, sample="noisy"),),
            loss=Loss(fn=weighted_mse, reads=("out", "target", "weight")),
        )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over the U-Net."""
        return self.optimizer.build(self)

    def draw_samples(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> Tensor:
        """Draw one image per caption, ``[batch, 3, size, size]``.

        The weights must be whole: see `callbacks.whole`.
        """
        context = encode_captions(self.spec.frozen[:2], fields, self.device)
        request = SampleRequest(
            noise=starting_noise(self.seed, len(context), self.latent_shape, self.device),
            num_steps=num_steps,
            conditions={"context": context},
            guidance=Guidance(scale=guidance, unconditional={"context": torch.zeros_like(context)}),
        )
        scheduler = DDIMScheduler.from_config(self.scheduler.config)
        latents = sample(backbone_denoiser(self.spec.backbones[0]), scheduler, request)
        return nn.functional.pixel_shuffle(latents, self.unshuffle)

    def _captions(self) -> tuple[FrozenComponent, FrozenComponent]:
        return caption_components(
            self.text,
            dropout=self.caption_dropout,
            scale=self.context_scale,
            seed=self.seed,
        )

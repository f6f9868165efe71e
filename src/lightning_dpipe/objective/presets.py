"""Whole training problems at full size, on the meta device: what a plan is made for before renting.

In:     the image size. Out: a PipelineSpec with encoders, noise, backbone and loss, no memory used.
"""

from typing import Any

import torch
from diffusers import AutoencoderKL, ControlNetModel, DDPMScheduler, UNet2DConditionModel

from lightning_dpipe.models import presets
from lightning_dpipe.models.controlnet import controlnet_components
from lightning_dpipe.models.spec import Field, FrozenComponent, Loss, PipelineSpec
from lightning_dpipe.models.text import clip_encoder
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.latents import vae_encoder
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule

NUM_TOKENS = 77
_LOSS = Loss(fn=weighted_mse, reads=("out", "target", "weight"))
_SD_SCHEDULE: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}


def sd21_spec(*, image_size: int = 512) -> PipelineSpec:
    """Stable Diffusion 2.1: VAE, text encoder and noise frozen, the U-Net trained."""
    unet = presets.on_meta(UNet2DConditionModel, presets.SD21_UNET)
    return PipelineSpec(
        inputs=_inputs(image_size),
        frozen=_frozen(presets.SD21_TEXT, "v_prediction"),
        backbones=(unet_backbone(unet, sample="noisy", check=False),),
        loss=_LOSS,
    )


def controlnet_spec(*, image_size: int = 512) -> PipelineSpec:
    """ControlNet v1.0 on Stable Diffusion 1.5: also the locked encoder is frozen work."""
    unet = presets.on_meta(UNet2DConditionModel, presets.SD15_UNET)
    controlnet = presets.on_meta(ControlNetModel, presets.CONTROLNET_SD15)
    locked, backbone = controlnet_components(controlnet, unet, sample="noisy", check=False)
    return PipelineSpec(
        inputs={**_inputs(image_size), "hint": Field(shape=(3, image_size, image_size))},
        frozen=(*_frozen(presets.SD15_TEXT, "epsilon"), locked),
        backbones=(backbone,),
        loss=_LOSS,
    )


def _inputs(image_size: int) -> dict[str, Field]:
    return {
        "image": Field(shape=(3, image_size, image_size)),
        "input_ids": Field(shape=(NUM_TOKENS,), dtype=torch.int64),
    }


def _frozen(text: Any, prediction: str) -> tuple[FrozenComponent, ...]:
    vae = presets.on_meta(AutoencoderKL, presets.SD_VAE)
    scheduler = DDPMScheduler(prediction_type=prediction, **_SD_SCHEDULE)
    return (
        clip_encoder(presets.text_encoder_on_meta(text), check=False),
        vae_encoder(vae, seed=0, check=False),
        noise_component(NoiseSchedule.from_scheduler(scheduler), seed=0),
    )

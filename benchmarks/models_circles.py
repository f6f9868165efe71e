"""A ControlNet that a benchmark can train to obey: circles, pixels in place of a VAE's latents.

Blocks of 8 x 8 pixels become channels, which a VAE would do with weights: nothing has to be trained
before, and what is drawn can be looked at. First the U-Net learns circles from captions; then it is
locked, and its ControlNet learns where they are.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ControlNetModel, DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from torch import Tensor, nn

from lightning_dpipe.data.circles import WORDS
from lightning_dpipe.models.controlnet import ControlledUNet, controlnet_components
from lightning_dpipe.models.spec import Field, FrozenComponent, Layer, Loss, PipelineSpec
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.pixels import pixel_latents
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.sampling.simple import SampleRequest, sample
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig

SIZE, TOKENS, BLOCK = 64, 6, 8
CHANNELS, SIDE = 3 * BLOCK**2, SIZE // BLOCK
UNET: dict[str, Any] = {
    "sample_size": SIDE, "in_channels": CHANNELS, "out_channels": CHANNELS,
    "block_out_channels": (96, 128), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": len(WORDS) + TOKENS, "attention_head_dim": 4,
    "use_linear_projection": True,
}  # fmt: skip


class Circles(DiffusionModule):
    """The U-Net, or, given a trained one, its ControlNet."""

    def __init__(self, *, locked: UNet2DConditionModel | None = None, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.locked = locked is not None
        self.scheduler = DDPMScheduler(
            prediction_type="sample", clip_sample=True, rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        )  # fmt: skip
        self.unet = UNet2DConditionModel(**UNET) if locked is None else locked
        self.controlnet = None if locked is None else ControlNetModel.from_unet(locked)

    def pipeline_spec(self) -> PipelineSpec:
        """Captions are one word a token; all but the trained model is frozen work."""
        words = Layer(name="words", module=_words, reads=("input_ids",), writes=("context",))
        frozen = [
            FrozenComponent(name="captions", layers=(words,)),
            pixel_latents(BLOCK),
            noise_component(NoiseSchedule.from_scheduler(self.scheduler), seed=self.seed),
        ]
        inputs = {
            "image": Field(shape=(3, SIZE, SIZE)),
            "input_ids": Field(shape=(TOKENS,), dtype=torch.int64),
        }
        if self.controlnet is None:
            backbone = unet_backbone(self.unet, sample="noisy")
        else:
            locked, backbone = controlnet_components(self.controlnet, self.unet, sample="noisy")
            frozen.append(locked)
            inputs["hint"] = Field(shape=(3, SIZE, SIZE))
        return PipelineSpec(
            inputs=inputs,
            frozen=tuple(frozen),
            backbones=(backbone,),
            loss=Loss(fn=weighted_mse, reads=("out", "target", "weight")),
        )

    def configure_optimizers(self) -> Any:
        """AdamW, with decay to nothing."""
        return AdamWConfig(lr=1e-3, warmup_steps=20, decay="cosine").build(self)

    @torch.no_grad()
    def draw(self, fields: Mapping[str, Tensor], *, num_steps: int = 20) -> Tensor:
        """Images ``[batch, 3, size, size]`` of captions, and of hints if there is a ControlNet."""
        whole = None if self.controlnet is None else ControlledUNet(self.controlnet, self.unet)

        def denoise(tensors: Mapping[str, Tensor]) -> Tensor:
            read = (tensors["noisy"], tensors["timestep"], tensors["context"])
            out: Tensor = (
                self.unet(*read, return_dict=False)[0]
                if whole is None
                else whole(*read, tensors["hint"])
            )
            return out

        count = len(fields["input_ids"])
        request = SampleRequest(
            noise=starting_noise(self.seed, count, (CHANNELS, SIDE, SIDE), self.device),
            num_steps=num_steps,
            conditions={"context": _words(fields["input_ids"]), "hint": fields["hint"]},
        )
        scheduler = DDIMScheduler.from_config(self.scheduler.config)
        return nn.functional.pixel_shuffle(sample(denoise, scheduler, request), BLOCK)


def _words(ids: Tensor) -> Tensor:
    """Each word and its place, both one-hot, ``[batch, tokens, width]``."""
    words = nn.functional.one_hot(ids, len(WORDS)).to(torch.float32)
    places = torch.eye(TOKENS, device=ids.device).expand(len(ids), -1, -1)
    return torch.cat([words, places], dim=2)

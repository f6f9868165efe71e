"""A cascade on pixels: a base U-Net draws small pictures, a second one doubles their side.

In:     image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``; input_ids and attention_mask int64
        ``[batch, tokens]``.
Out:    images of a caption. Two backbones, trained at once: each has its own noise and loss and
        neither reads the other, so that the strategy pipes them in opposite directions. Captions
        are encoded once for both, ahead, in the bubbles.
Source: cascade and conditioning augmentation: Ho et al., arXiv 2106.15282 (see
        `objective.cascade`); training both in opposite directions: DiffusionPipe, arXiv 2405.01248,
        section 4.3.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Backbone, Field, FrozenComponent, Loss, PipelineSpec
from lightning_dpipe.models.unet import unet_backbone
from lightning_dpipe.objective.cascade import (
    ConditioningAugmentation,
    conditioning_component,
    small_picture,
)
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

FACTOR = 2
"""Side of the large picture over that of the small one."""


class Cascade(DiffusionModule):
    """Two U-Nets and a frozen text encoder.

    Args:
        base: Arguments of diffusers' ``UNet2DConditionModel``, on the small pictures;
            ``in_channels`` is ``3 * unshuffle ** 2``.
        sr: Those of the super-resolution model; ``in_channels`` is
            ``3 * sr_unshuffle ** 2 * 2 + 1``: its noisy picture, the small one, and how far that
            was noised.
        scheduler: A diffusers scheduler: noise, timesteps and what both models predict.
        optimizer: AdamW and its schedule, over both.
        image_size: Side of the large pictures in pixels.
        num_tokens: Length that captions are padded to.
        text: The frozen encoder; see `TextSource`.
        unshuffle: Pixels per side that become the base model's channels.
        sr_unshuffle: Those of the super-resolution model.
        caption_dropout: Share of samples trained without their caption, for guidance.
        context_scale: Factor on the encoded captions; see `context_dropout`.
        augmentation: Most noise on the small picture in training, as a share of the schedule.
        sample_augmentation: Noise on the small picture when samples are drawn.
        seed: Key of all draws; see `DiffusionModule`.

    Raises:
        SpecError: Sampling would noise more than training, or the image does not divide.
    """

    def __init__(
        self,
        *,
        base: Mapping[str, Any],
        sr: Mapping[str, Any],
        scheduler: Any,
        optimizer: AdamWConfig,
        image_size: int = 64,
        num_tokens: int = 16,
        text: TextSource = None,
        unshuffle: int = 2,
        sr_unshuffle: int = 2,
        caption_dropout: float = 0.1,
        context_scale: float = 1.0,
        augmentation: float = 0.5,
        sample_augmentation: float = 0.1,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed=seed)
        if not 0.0 <= sample_augmentation <= augmentation:
            raise SpecError(
                f"sample_augmentation={sample_augmentation} is not in [0, augmentation="
                f"{augmentation}]: the model is trained on no other noise"
            )
        for size, factor in ((image_size, sr_unshuffle), (image_size, FACTOR * unshuffle)):
            if size % factor:
                raise SpecError(f"image_size={size} is not a multiple of {factor}; round it up")
        self.base_config, self.sr_config = dict(base), dict(sr)
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.image_size = image_size
        self.num_tokens = num_tokens
        self.text_source = text
        self.unshuffle, self.sr_unshuffle = unshuffle, sr_unshuffle
        self.caption_dropout = caption_dropout
        self.context_scale = context_scale
        self.augmentation, self.sample_augmentation = augmentation, sample_augmentation

    def configure_model(self) -> None:
        """Build both U-Nets and load the text encoder."""
        if hasattr(self, "base"):
            return
        self.base = UNet2DConditionModel(**self.base_config)
        self.sr = UNet2DConditionModel(**self.sr_config)
        self.text = bert_part(self.text_source)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """``(channels, side, side)`` of what each model draws, unshuffled."""
        sides = {
            "base": (self.image_size // FACTOR, self.unshuffle),
            "sr": (self.image_size, self.sr_unshuffle),
        }
        return {n: (3 * u * u, size // u, size // u) for n, (size, u) in sides.items()}

    @cached_property
    def conditioning(self) -> ConditioningAugmentation:
        """How a small picture becomes the second model's input."""
        return ConditioningAugmentation(
            schedule=NoiseSchedule.from_scheduler(self.scheduler),
            seed=self.seed,
            strongest=self.augmentation,
            factor=FACTOR,
            unshuffle=self.sr_unshuffle,
        )

    def pipeline_spec(self) -> PipelineSpec:
        """Both U-Nets are cut at their layers; all else runs ahead."""
        return PipelineSpec(
            inputs={
                "image": Field(shape=(3, self.image_size, self.image_size)),
                **caption_fields(self.num_tokens),
            },
            frozen=(
                *self._captions(),
                small_picture(FACTOR),
                conditioning_component(self.conditioning),
                *self._noisy("base", "small", self.unshuffle),
                *self._noisy("sr", "image", self.sr_unshuffle),
            ),
            backbones=(
                self._backbone("base", self.base, None),
                self._backbone("sr", self.sr, "conditioning"),
            ),
            loss={
                name: Loss(fn=weighted_mse, reads=("out", f"{name}_target", f"{name}_weight"))
                for name in ("base", "sr")
            },
        )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over both U-Nets."""
        return self.optimizer.build(self)

    def draw_samples(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> Tensor:
        """Draw one image per caption, ``[batch, 3, size, size]``: small ones, then enlarged.

        The weights must be whole: see `callbacks.whole`.
        """
        context = encode_captions(self.spec.frozen[:2], fields, self.device)
        small = self._draw("base", context, {}, num_steps, guidance)
        small = nn.functional.pixel_shuffle(small, self.unshuffle).clamp(-1.0, 1.0)
        return self.enlarge(small, context, num_steps=num_steps, guidance=guidance)

    def enlarge(self, small: Tensor, context: Tensor, *, num_steps: int, guidance: float) -> Tensor:
        """Draw the large pictures of small ones ``[batch, 3, size / 2, size / 2]``."""
        noise = starting_noise(self.seed, len(small), small.shape[1:], self.device, "small_sample")
        level = torch.full((len(small),), self.sample_augmentation, device=self.device)
        conditions = {"conditioning": self.conditioning.at(small, noise, level)}
        large = self._draw("sr", context, conditions, num_steps, guidance)
        return nn.functional.pixel_shuffle(large, self.sr_unshuffle)

    def _draw(
        self,
        name: str,
        context: Tensor,
        conditions: Mapping[str, Tensor],
        num_steps: int,
        guidance: float,
    ) -> Tensor:
        noise = starting_noise(
            self.seed, len(context), self.shapes[name], self.device, f"{name}_sample"
        )
        request = SampleRequest(
            noise=noise,
            num_steps=num_steps,
            conditions={"context": context, **conditions},
            guidance=Guidance(scale=guidance, unconditional={"context": torch.zeros_like(context)}),
        )
        backbone = next(b for b in self.spec.backbones if b.name == name)
        return sample(
            backbone_denoiser(backbone),
            DDIMScheduler.from_config(self.scheduler.config),
            request,
            noisy=f"{name}_noisy",
            timestep=f"{name}_timestep",
        )

    def _captions(self) -> tuple[FrozenComponent, FrozenComponent]:
        return caption_components(
            self.text, dropout=self.caption_dropout, scale=self.context_scale, seed=self.seed
        )

    def _noisy(self, name: str, image: str, unshuffle: int) -> tuple[FrozenComponent, ...]:
        latents, schedule = f"{name}_latents", NoiseSchedule.from_scheduler(self.scheduler)
        return (
            pixel_latents(unshuffle, reads=image, writes=latents, name=f"{name}_pixels"),
            noise_component(
                schedule, seed=self.seed, latents=latents, name=f"{name}_noise", prefix=f"{name}_"
            ),
        )

    def _backbone(self, name: str, unet: UNet2DConditionModel, beside: str | None) -> Backbone:
        return unet_backbone(
            unet, name=name, sample=f"{name}_noisy", timestep=f"{name}_timestep", self_cond=beside
        )

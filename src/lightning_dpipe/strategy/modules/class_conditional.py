"""Class-conditional diffusion on pixels: a DiT that reads its own first estimate.

In:     image float32 ``[batch, channels, side, side]`` in ``[-1, 1]``, label int64 ``[batch]``.
Out:    images of a class. No weights are frozen: noise and label dropout run ahead all the same.
Source: DiT: Peebles & Xie, arXiv 2212.09748; self-conditioning: Chen et al., arXiv 2208.04202.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from lightning_dpipe.models.dit import dit_backbone
from lightning_dpipe.models.spec import Field, Loss, PipelineSpec
from lightning_dpipe.models.widen import widen_input
from lightning_dpipe.objective.dropout import label_dropout
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.objective.selfcond import self_conditioning
from lightning_dpipe.sampling.simple import Guidance, SampleRequest, backbone_denoiser, sample
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig


class ClassConditional(DiffusionModule):
    """A DiT on small images.

    Args:
        dit: Arguments of diffusers' ``DiTTransformer2DModel``; ``num_embeds_ada_norm`` is the
            number of classes, and the null class comes after them.
        scheduler: A diffusers scheduler: noise, timesteps and what the model predicts.
        optimizer: AdamW and its schedule.
        label_dropout: Share of samples trained without their label, for guidance.
        self_conditioning: Share of steps with a first estimate; None to train without.
        min_snr_gamma: Weigh losses by min-SNR; None weighs all alike.
        seed: Key of all draws; see `DiffusionModule`.
    """

    def __init__(
        self,
        *,
        dit: Mapping[str, Any],
        scheduler: Any,
        optimizer: AdamWConfig,
        label_dropout: float = 0.1,
        self_conditioning: float | None = 0.5,
        min_snr_gamma: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed=seed)
        self.dit_config = dict(dit)
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.label_dropout = label_dropout
        self.self_conditioning = self_conditioning
        self.min_snr_gamma = min_snr_gamma

    def configure_model(self) -> None:
        """Build the transformer, with input channels for the estimate."""
        if hasattr(self, "dit"):
            return
        self.dit = DiTTransformer2DModel(**self.dit_config)
        if self.self_conditioning is not None:
            widen_input(self.dit, self.dit_config["in_channels"])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(channels, side, side)`` of one image."""
        side = self.dit_config["sample_size"]
        return (self.dit_config["in_channels"], side, side)

    def pipeline_spec(self) -> PipelineSpec:
        """Label dropout and noise run ahead; the transformer is cut at its blocks."""
        schedule = NoiseSchedule.from_scheduler(self.scheduler)
        estimate = None
        if self.self_conditioning is not None:
            estimate = self_conditioning(
                schedule, shape=self.image_shape, probability=self.self_conditioning
            )
        return PipelineSpec(
            inputs={
                "image": Field(shape=self.image_shape),
                "label": Field(dtype=torch.int64, shape=()),
            },
            frozen=(
                label_dropout(self.label_dropout, seed=self.seed, null_class=self.null_class),
                noise_component(
                    schedule, seed=self.seed, latents="image", min_snr_gamma=self.min_snr_gamma
                ),
            ),
            backbones=(
                dit_backbone(
                    self.dit,
                    sample="noisy",
                    label="class_label",
                    self_cond=None if estimate is None else estimate.writes,
                ),
            ),
            loss=Loss(fn=weighted_mse, reads=("out", "target", "weight")),
            self_conditioning=estimate,
        )

    @property
    def null_class(self) -> int:
        """The label that stands for "no class"."""
        return int(self.dit_config["num_embeds_ada_norm"])

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over the transformer."""
        return self.optimizer.build(self)

    def draw_samples(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> Tensor:
        """Draw one image per ``fields["label"]``, ``[batch, channels, side, side]``.

        The weights must be whole: see `callbacks.whole`.
        """
        request = self.sample_request(fields, num_steps=num_steps, guidance=guidance)
        return sample(backbone_denoiser(self.spec.backbones[0]), self.sampler(), request)

    def sample_request(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> SampleRequest:
        """Starting noise, labels and guidance of `draw_samples`."""
        label = fields["label"].to(self.device)
        return SampleRequest(
            noise=starting_noise(self.seed, len(label), self.image_shape, self.device),
            num_steps=num_steps,
            conditions={"class_label": label},
            guidance=Guidance(
                scale=guidance,
                unconditional={"class_label": torch.full_like(label, self.null_class)},
            ),
            self_conditioning=self.spec.self_conditioning,
        )

    def sampler(self) -> DDIMScheduler:
        """A fresh scheduler to draw with."""
        made: DDIMScheduler = DDIMScheduler.from_config(self.scheduler.config)
        return made

    def decode(self, latents: Tensor) -> Tensor:
        """The model works on pixels."""
        return latents

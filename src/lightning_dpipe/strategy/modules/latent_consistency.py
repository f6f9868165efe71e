"""Latent consistency distillation: a U-Net learns to jump where its frozen teacher walks.

In:     see `latent`.
Out:    images of a caption in a few steps. The teacher reads data and keyed noise only, so its two
        evaluations, with and without the caption, run ahead in the bubbles with the encoders; noise
        is drawn anew for every step, so no cache could take their place.
Source: Luo et al., arXiv 2310.04378; see `objective.consistency`.
"""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from diffusers import LCMScheduler, StableDiffusionPipeline
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.models.spec import Backbone, FrozenComponent, Layer, PipelineSpec
from lightning_dpipe.models.targets import with_target
from lightning_dpipe.models.text import clip_encoder
from lightning_dpipe.models.unet import unet_layers
from lightning_dpipe.objective.consistency import Consistency
from lightning_dpipe.objective.latents import vae_encoder
from lightning_dpipe.sampling.simple import backbone_denoiser
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.stable_diffusion import UNCHECKED, StableDiffusion


class LatentConsistency(StableDiffusion):
    """A Stable Diffusion U-Net (``unet=``), distilled from itself.

    Args:
        guidance: Scale of the teacher's guidance, which the student learns; 1 is none.
        num_solver_steps: Steps of the teacher's solver over the whole schedule.
        huber: Of the pseudo-Huber loss; see `Consistency`.
        options: See `CaptionedModule`.

    Raises:
        UnsupportedError: Self-conditioning, min-SNR weights or caption dropout are asked for.
    """

    def __init__(
        self,
        *,
        guidance: float = 7.5,
        num_solver_steps: int = 50,
        huber: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(**{"caption_dropout": 0.0, **options})
        for name, value in (
            ("self_conditioning", self.config.self_conditioning),
            ("min_snr_gamma", self.config.min_snr_gamma),
            ("lora", self.config.lora),
            ("caption_dropout", self.caption_dropout or None),
        ):
            if value is not None:
                raise UnsupportedError(
                    f"{name}={value} for a consistency distillation, whose teacher and loss have "
                    "no place for it; leave it out"
                )
        self.guidance, self.num_solver_steps, self.huber = guidance, num_solver_steps, huber

    def build_backbone(self) -> None:
        """The student starts as its teacher."""
        super().build_backbone()
        self.teacher = copy.deepcopy(self.unet).requires_grad_(False)

    @cached_property
    def consistency(self) -> Consistency:
        """The objective."""
        return Consistency(
            schedule=self.schedule,
            seed=self.seed,
            num_solver_steps=self.num_solver_steps,
            guidance=self.guidance,
            huber=self.huber,
        )

    def pipeline_spec(self) -> PipelineSpec:
        """The student runs at both ends of the teacher's step, with gradient at the first only."""
        student = with_target(
            unet_layers(self.unet, sample="noisy"),
            unet_layers(
                self.unet, sample="solved", timestep="earlier", out="target_out", prefix="t_"
            ),
        )
        return PipelineSpec(
            inputs=self.inputs(),
            frozen=self.encoders(),
            backbones=(Backbone(name="unet", layers=student),),
            loss=self.consistency.pipeline_loss(),
            shapes=self.shapes({"image": 3}),
        )

    def encoders(self) -> tuple[FrozenComponent, ...]:
        """Frozen work up to both points of a trajectory: encoders, noise, teacher, solver."""
        return (
            clip_encoder(self.text),
            self._empty_caption(),
            clip_encoder(self.text, name="empty_text", input_ids="empty_ids", out="empty_context"),
            vae_encoder(self.vae, seed=self.seed),
            self.consistency.draw_component(),
            self._teacher("teacher", "context"),
            self._teacher("teacher_empty", "empty_context"),
            self.consistency.solver_component(),
        )

    def draw_samples(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> Tensor:
        """Draw one image per caption in `num_steps` jumps, ``[batch, 3, size, size]``.

        Multistep consistency sampling (arXiv 2303.01469, algorithm 1), noise keyed by the seed.
        `guidance` has no effect: the student has learnt the teacher's. The weights must be whole:
        see `callbacks.whole`.
        """
        given = {name: fields[name].to(self.device) for name in self.condition_inputs()}
        context = self.encode(given)["context"]
        student = Backbone(name="unet", layers=unet_layers(self.unet, sample="noisy"))
        denoise = backbone_denoiser(student)
        grid = self.consistency.grid[::-1]
        jumps = grid[
            np.linspace(0, len(grid), min(num_steps, len(grid)), endpoint=False).astype(int)
        ]
        x = torch.zeros(len(context), *self.latent_shape, device=self.device)
        with torch.no_grad():
            for place, timestep in enumerate(jumps.tolist()):
                t = torch.full((len(context),), timestep, device=self.device)
                purpose = f"sample_{place}"
                noise = starting_noise(
                    self.seed, len(context), self.latent_shape, self.device, purpose
                )
                noisy = self.schedule.add_noise(x, noise, t)
                out = denoise({"noisy": noisy, "timestep": t, "context": context})
                x = self.consistency.end(out, noisy, t)
        return self.decode(x)

    def sampler(self) -> LCMScheduler:
        """diffusers' scheduler of the same jumps, on the teacher's noise schedule."""
        # diffusers would replace what the teacher's scheduler left at its defaults with LCM's own.
        config = {k: v for k, v in self.scheduler.config.items() if k != "_use_default_values"}
        made: LCMScheduler = LCMScheduler.from_config(
            config, original_inference_steps=self.num_solver_steps
        )
        return made

    def to_pipeline(self) -> StableDiffusionPipeline | None:
        """diffusers' pipeline with its LCM scheduler; call it with ``guidance_scale=1``."""
        if self.config.pipeline_source is None:
            return None
        parts = self.pipeline_parts(self.config.pipeline_source)
        parts["scheduler"] = self.sampler()
        return StableDiffusionPipeline(unet=self.unet, **parts, **UNCHECKED)

    def _teacher(self, name: str, context: str) -> FrozenComponent:
        layers = unet_layers(self.teacher, sample="noisy", context=context, out=f"{name}_out")
        return FrozenComponent(name=name, layers=layers)

    def _empty_caption(self) -> FrozenComponent:
        empty = self.empty["input_ids"]

        def replace(input_ids: Tensor) -> Tensor:
            return torch.tensor(empty, device=input_ids.device).expand_as(input_ids).clone()

        layer = Layer(name="empty", module=replace, reads=("input_ids",), writes=("empty_ids",))
        return FrozenComponent(name="empty_caption", layers=(layer,))

"""What models on a VAE's latents share: images become noisy latents, frozen; latents are drawn.

In:     image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``, and what the model is conditioned
        on.
Out:    noisy latents, timestep, target, weight: what a backbone trains on; and images. VAE, noise
        and what encodes the conditions run ahead, in the bubbles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.names import outside_reads
from lightning_dpipe.models.parts import Source, diffusers_part
from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Backbone,
    Field,
    FrozenComponent,
    Loss,
    PipelineSpec,
    SelfConditioning,
)
from lightning_dpipe.models.widen import widen_input
from lightning_dpipe.objective.latents import vae_encoder, vae_posterior
from lightning_dpipe.objective.losses import weighted_mse
from lightning_dpipe.objective.noise import TimestepDensity, noise_component
from lightning_dpipe.objective.resolution import ResolutionShift
from lightning_dpipe.objective.schedule import NoiseSchedule, Prediction
from lightning_dpipe.objective.selfcond import self_conditioning
from lightning_dpipe.sampling.simple import Guidance, SampleRequest, backbone_denoiser, sample
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig

LATENT_CLAMP = 4.0
"""Bound of a self-conditioning estimate, in standard deviations of the latents."""
LOSS = Loss(fn=weighted_mse, reads=("out", "target", "weight"))


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The frozen side and the objective.

    Attributes:
        image_size: Side of the images in pixels.
        vae: Arguments of diffusers' ``AutoencoderKL``.
        pretrained: Folder or hub id of a diffusers pipeline, which brings its own configurations;
            or one file (``.safetensors``, ``.ckpt``), of a model as configured here; None: the
            configurations given, with random weights.
        parts: Where single parts come from instead (``vae``, ``unet``, ``controlnet``,
            ``text_encoder``, ``tokenizer``): the part's folder, one file, or hub id.
        revision: Of the hub.
        variant: Of the hub's files.
        scheduler: A diffusers scheduler: noise, timesteps and what the model predicts; None takes
            the one of `pretrained`.
        timesteps: How training draws them: ``uniform``, or ``logit_normal`` (flow models).
        self_conditioning: Share of steps with a first estimate; None trains without.
        min_snr_gamma: Weigh losses by min-SNR; None weighs all alike.
        prediction: What the backbone predicts, if not what the scheduler says.
        noise_offset: See `noise_component`.
        lora: Train low-rank adapters only: fields of `models.lora.LoRA`; None trains the backbone.
        buckets: More shape classes beside the square of `image_size`: (height, width) by name.
        precomputed: Batches hold ``moments`` (mean and log-variance, see `data.latents`) instead of
            images, and the VAE's encoder does not run.
    """

    image_size: int = 512
    vae: Mapping[str, Any] | None = None
    pretrained: str | None = None
    parts: Mapping[str, str] | None = None
    revision: str | None = None
    variant: str | None = None
    scheduler: Any = None
    timesteps: TimestepDensity | str = TimestepDensity.UNIFORM
    self_conditioning: float | None = None
    min_snr_gamma: float | None = None
    prediction: str | None = None
    noise_offset: float = 0.0
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    buckets: Mapping[str, Sequence[int]] | None = None
    precomputed: bool = False
    lora: Mapping[str, Any] | None = None

    @property
    def source(self) -> Source | None:
        """Where trained weights come from."""
        if self.pretrained is None and not self.parts:
            return None
        return Source(
            path=self.pretrained,
            revision=self.revision,
            variant=self.variant,
            parts=dict(self.parts or {}),
        )

    @property
    def pipeline_source(self) -> Source | None:
        """The same, if it is a whole pipeline: one file has neither tokenizer nor scheduler."""
        source = self.source
        return source if source is not None and source.has_tokenizer else None


class LatentModule(DiffusionModule):
    """A module whose backbone works on a VAE's latents.

    A subclass says what the backbone is and what conditions it. `part` is the keyword that takes
    the backbone's configuration, its attribute, and its folder in a pipeline.

    Args:
        seed: Key of all draws; see `DiffusionModule`.
        options: The backbone's configuration under the name of `part` (not read with
            ``pretrained``), and fields of `LatentConfig`.
    """

    kind: ClassVar[type[nn.Module]]
    part: ClassVar[str] = "transformer"
    scheduler_kind: ClassVar[type] = DDPMScheduler
    patch: ClassVar[int] = 2
    transformer: Any  # the attribute that `part` names, if it is not another one

    def __init__(self, *, seed: int | None = None, **options: Any) -> None:
        super().__init__(seed=seed)
        self.backbone_config: Mapping[str, Any] | None = options.pop(self.part, None)
        self.config = LatentConfig(**options)

    def configure_model(self) -> None:
        """Load or build encoders and backbone, with input channels for an estimate."""
        if not hasattr(self, "vae"):
            self.build_encoders()
            self.build_backbone()

    def build_encoders(self) -> None:
        """Make the VAE and the scheduler; none of their weights is trained.

        Raises:
            SpecError: A part is neither configured nor found, or the image does not divide.
        """
        config = self.config
        source = config.source
        self.vae = diffusers_part(AutoencoderKL, config.vae, source, "vae")
        self.vae.requires_grad_(False)  # the decoder too, which no layer runs
        side = config.image_size
        self.latent_shape = _latent_shape(self.vae, "image_size", (side, side))
        scheduler = config.scheduler
        if scheduler is None:
            if config.pipeline_source is None:
                raise SpecError("no scheduler is given, and no pretrained pipeline that has one")
            scheduler = config.pipeline_source.load(self.scheduler_kind, "scheduler")
        self.scheduler = scheduler

    def build_backbone(self) -> None:
        """Make the model that is trained."""
        model = diffusers_part(self.kind, self.backbone_config, self.config.source, self.part)
        setattr(self, self.part, model)
        if self.config.self_conditioning is not None:
            widen_input(model, self.latent_shape[0])

    def backbone(self, self_cond: str | None) -> Backbone:
        """The trained layers; they read ``noisy`` and the estimate under the name given."""
        raise NotImplementedError

    def condition_inputs(self) -> dict[str, Field]:
        """The batch fields beside the image that `conditioning` reads."""
        return {}

    def conditioning(self) -> tuple[FrozenComponent, ...]:
        """Frozen work that makes what the backbone is conditioned on of those fields."""
        return ()

    def unconditional(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fields of the same samples without a condition, for guidance."""
        return dict(fields)

    def pipeline_spec(self) -> PipelineSpec:
        """Encoders and noise run ahead, the backbone is cut at its layers."""
        estimate = self.estimate()
        return PipelineSpec(
            inputs=self.inputs(),
            frozen=self.encoders(),
            backbones=(self.backbone(None if estimate is None else estimate.writes),),
            loss=LOSS,
            self_conditioning=estimate,
            shapes=self.shapes({"image": 3}),
        )

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The forward process."""
        return NoiseSchedule.from_scheduler(self.scheduler, prediction=self.config.prediction)

    @cached_property
    def shift(self) -> ResolutionShift | None:
        """Its time shift by resolution, if the scheduler has one."""
        return ResolutionShift.from_scheduler(self.scheduler, self.patch)

    def inputs(self) -> dict[str, Field]:
        """The batch fields that `encoders` read."""
        size = self.config.image_size
        name, shape = "image", (3, size, size)
        if self.config.precomputed:
            name, shape = "moments", _moments(self.latent_shape)
        return {name: Field(shape=shape), **self.condition_inputs()}

    def shapes(self, pixels: Mapping[str, int]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shape classes of `LatentConfig.buckets`; `pixels` are the channels of image fields.

        Raises:
            SpecError: A side does not divide.
        """
        found = {}
        for name, sides in (self.config.buckets or {}).items():
            latent = _latent_shape(self.vae, f"buckets.{name}", sides)
            found[name] = {field: (count, *sides) for field, count in pixels.items()}
            if self.config.precomputed:
                del found[name]["image"]
                found[name]["moments"] = _moments(latent)
            if self.config.self_conditioning is not None:
                found[name]["estimate"] = latent
        return found

    def encoders(self) -> tuple[FrozenComponent, ...]:
        """Frozen work up to noisy, timestep, target, weight and the conditions."""
        config = self.config
        noise = noise_component(
            self.schedule,
            seed=self.seed,
            density=TimestepDensity(config.timesteps),
            min_snr_gamma=config.min_snr_gamma,
            shift=self.shift,
            noise_offset=config.noise_offset,
        )
        encoded = vae_posterior if config.precomputed else vae_encoder
        return (*self.conditioning(), encoded(self.vae, seed=self.seed), noise)

    def estimate(self) -> SelfConditioning | None:
        """Self-conditioning on latents, if it is on."""
        probability = self.config.self_conditioning
        if probability is None:
            return None
        return self_conditioning(
            self.schedule, shape=self.latent_shape, probability=probability, clamp=LATENT_CLAMP
        )

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW over what is trained."""
        return self.config.optimizer.build(self)

    def draw_samples(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> Tensor:
        """Draw one image per condition, ``[batch, 3, size, size]`` in ``[-1, 1]``.

        The weights must be whole: see `callbacks.whole`.
        """
        request = self.sample_request(fields, num_steps=num_steps, guidance=guidance)
        return self.decode(sample(self.denoiser(), self.sampler(), request))

    def sample_request(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> SampleRequest:
        """Starting noise, conditions and guidance of `draw_samples`."""
        given = {name: fields[name].to(self.device) for name in self.condition_inputs()}
        conditions = {**self.encode(given), **self.more_conditions(fields)}
        conditions, guide = self.guided(conditions, given, guidance)
        return SampleRequest(
            noise=starting_noise(
                self.seed, len(next(iter(given.values()))), self.latent_shape, self.device
            ),
            num_steps=num_steps,
            conditions=conditions,
            guidance=guide,
            self_conditioning=self.spec.self_conditioning,
            timetable=self.timetable(num_steps),
        )

    def saved_scheduler(self) -> Any:
        """The scheduler that an exported pipeline draws with."""
        return type(self.scheduler).from_config(self.scheduler.config, **self._override())

    def _override(self) -> dict[str, str]:
        """What a scheduler that samples must be told of `LatentConfig.prediction`."""
        prediction = self.config.prediction
        return {} if prediction is None else {"prediction_type": str(prediction)}

    def denoiser(self) -> Any:
        """What turns noisy latents and conditions into the model's output."""
        return backbone_denoiser(self.spec.backbones[0])

    def sampler(self) -> Any:
        """A fresh scheduler to draw with: DDIM, or the flow's own."""
        flow = self.schedule.prediction is Prediction.FLOW
        return (type(self.scheduler) if flow else DDIMScheduler).from_config(
            self.scheduler.config, **self._override()
        )

    def timetable(self, num_steps: int) -> dict[str, Any]:
        """What else the sampler is told about its steps."""
        shift = self.shift
        return {} if shift is None else {"mu": shift.mu(shift.num_tokens(self.latent_shape))}

    def guided(
        self, conditions: dict[str, Tensor], given: Mapping[str, Tensor], scale: float
    ) -> tuple[dict[str, Tensor], Guidance | None]:
        """Conditions of samples with the condition fields `given`, and how they are guided."""
        if scale == 1.0:
            return conditions, None
        unconditional = self.encode(self.unconditional(given))
        return conditions, Guidance(scale=scale, unconditional=unconditional)

    def more_conditions(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the denoiser reads besides what `conditioning` makes."""
        return {}

    @torch.no_grad()
    def encode(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the backbone reads of the condition fields, by the layers that encode in training.

        A component that also needs an image or its noise does not run.
        """
        count = len(next(iter(given.values())))
        # A batch number below zero drops nothing, as in validation.
        values = {**given, DRAW_KEY: torch.full((count, 2), -1, dtype=torch.int64)}
        for component in self.spec.frozen:
            if {read.name for read in outside_reads(component)} <= values.keys():
                for layer in component.layers:
                    made = layer.module(*[values[name] for name in layer.reads])
                    made = made if isinstance(made, tuple) else (made,)
                    values.update(zip(layer.writes, made, strict=True))
        read = {read.name for read in outside_reads(self.spec.backbones[0])}
        return {name: values[name] for name in sorted(read & values.keys())}

    def real_images(self, fields: Mapping[str, Tensor]) -> Tensor:
        """The images of a batch, or what the VAE makes of their means."""
        if not self.config.precomputed:
            return fields["image"]
        vae: Any = self.vae.config
        mean = fields["moments"].to(self.device).chunk(2, dim=1)[0]
        return self.decode((mean - (vae.shift_factor or 0.0)) * vae.scaling_factor).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images ``[batch, 3, size, size]`` of scaled latents, clamped to ``[-1, 1]``."""
        config: Any = self.vae.config
        latents = latents / config.scaling_factor + (config.shift_factor or 0.0)
        images: Tensor = self.vae.decode(latents, return_dict=False)[0]
        return images.clamp(-1.0, 1.0)


def _moments(latent: tuple[int, int, int]) -> tuple[int, int, int]:
    """Shape of mean and log-variance of one latent."""
    channels, height, width = latent
    return (2 * channels, height, width)


def _latent_shape(vae: AutoencoderKL, name: str, sides: Sequence[int]) -> tuple[int, int, int]:
    """``(channels, height, width)`` of one latent; `name` is the option that `sides` are from."""
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    for side in sides:
        if side % factor:
            down = side // factor * factor
            raise SpecError(
                f"{name}={side} is not a multiple of the VAE's {factor}; use {down} or "
                f"{down + factor}"
            )
    height, width = sides
    return (vae.config.latent_channels, height // factor, width // factor)

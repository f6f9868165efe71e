"""What Stable Diffusion and ControlNet share: captions and images become latents, frozen.

In:     image float32 ``[batch, 3, size, size]`` in ``[-1, 1]``; input_ids int64 ``[batch,
        tokens]``.
Out:    noisy latents, timestep, target, weight and context: what a backbone trains on; and images
        of captions. VAE, text encoder, caption dropout and noise run ahead, in the bubbles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from transformers import CLIPTokenizer

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.parts import Source, clip_text_part, diffusers_part, empty_caption
from lightning_dpipe.models.spec import Field, FrozenComponent, SelfConditioning
from lightning_dpipe.models.text import clip_encoder
from lightning_dpipe.models.widen import widen_input
from lightning_dpipe.objective.dropout import caption_dropout
from lightning_dpipe.objective.latents import vae_encoder
from lightning_dpipe.objective.noise import noise_component
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.objective.selfcond import self_conditioning
from lightning_dpipe.sampling.simple import Guidance, SampleRequest, backbone_denoiser, sample
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig

LATENT_CLAMP = 4.0
"""Bound of a self-conditioning estimate, in standard deviations of the latents."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """The frozen side and the objective.

    Attributes:
        image_size: Side of the images in pixels.
        num_tokens: Length that captions are padded to.
        vae: Arguments of diffusers' ``AutoencoderKL``.
        text: Arguments of transformers' ``CLIPTextConfig``.
        pretrained: Folder or hub id of a diffusers pipeline, which brings its own configurations;
            or one file (``.safetensors``, ``.ckpt``), of a model as configured here; None: the
            configurations given, with random weights.
        parts: Where single parts come from instead (``vae``, ``unet``, ``controlnet``,
            ``text_encoder``, ``tokenizer``): the part's folder, one file, or hub id.
        revision: Of the hub.
        variant: Of the hub's files.
        scheduler: A diffusers scheduler: noise, timesteps and what the model predicts; None takes
            the one of `pretrained`.
        caption_dropout: Share of samples trained on the empty caption, for guidance.
        self_conditioning: Share of steps with a first estimate; None trains without.
        min_snr_gamma: Weigh losses by min-SNR; None weighs all alike.
        lora: Train low-rank adapters only: fields of `models.lora.LoRA`; None trains the backbone.
        buckets: More shape classes beside the square of `image_size`: (height, width) by name.
    """

    image_size: int = 512
    num_tokens: int = 77
    vae: Mapping[str, Any] | None = None
    text: Mapping[str, Any] | None = None
    pretrained: str | None = None
    parts: Mapping[str, str] | None = None
    revision: str | None = None
    variant: str | None = None
    scheduler: Any = None
    caption_dropout: float = 0.1
    self_conditioning: float | None = None
    min_snr_gamma: float | None = None
    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    buckets: Mapping[str, Sequence[int]] | None = None
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


class LatentModule(DiffusionModule):
    """A module whose backbone works on a VAE's latents and reads CLIP's encoding of captions.

    A subclass builds its backbone's modules in ``configure_model`` after `build_encoders`, and
    lists them in ``pipeline_spec`` after `encoders`.
    """

    def __init__(self, config: LatentConfig, *, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self.config = config

    def build_encoders(self) -> None:
        """Make the VAE, the text encoder and the scheduler; none of their weights is trained.

        Raises:
            SpecError: A part is neither configured nor found, or the image does not divide.
        """
        config = self.config
        source = config.source
        self.vae = diffusers_part(AutoencoderKL, config.vae, source, "vae")
        side = config.image_size
        self.latent_shape = _latent_shape(self.vae, "image_size", (side, side))
        self.text = clip_text_part(config.text, source)
        for encoder in (self.vae, self.text):  # the decoder too, which no layer runs
            encoder.requires_grad_(False)
        scheduler = config.scheduler
        if scheduler is None:
            if source is None or not source.has_tokenizer:
                raise SpecError("no scheduler is given, and no pretrained pipeline that has one")
            scheduler = source.load(DDPMScheduler, "scheduler")
        self.scheduler = scheduler
        self.empty_ids = empty_caption(self.text, source, config.num_tokens)

    def widen_for_estimate(self, model: nn.Module) -> None:
        """Give the backbone input channels for its own estimate, if it conditions on it."""
        if self.config.self_conditioning is not None:
            widen_input(model, self.latent_shape[0])

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The forward process."""
        return NoiseSchedule.from_scheduler(self.scheduler)

    def inputs(self) -> dict[str, Field]:
        """The batch fields that `encoders` read."""
        size = self.config.image_size
        return {
            "image": Field(shape=(3, size, size)),
            "input_ids": Field(shape=(self.config.num_tokens,), dtype=torch.int64),
        }

    def shapes(self, pixels: Mapping[str, int]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shape classes of `LatentConfig.buckets`; `pixels` are the channels of image fields.

        Raises:
            SpecError: A side does not divide.
        """
        found = {}
        for name, sides in (self.config.buckets or {}).items():
            latent = _latent_shape(self.vae, f"buckets.{name}", sides)
            found[name] = {field: (count, *sides) for field, count in pixels.items()}
            if self.config.self_conditioning is not None:
                found[name]["estimate"] = latent
        return found

    def encoders(self) -> tuple[FrozenComponent, ...]:
        """Frozen work up to noisy, timestep, target, weight and context."""
        config = self.config
        return (
            caption_dropout(
                config.caption_dropout, seed=self.seed, empty={"input_ids": self.empty_ids}
            ),
            clip_encoder(self.text, input_ids="caption_input_ids"),
            vae_encoder(self.vae, seed=self.seed),
            noise_component(self.schedule, seed=self.seed, min_snr_gamma=config.min_snr_gamma),
        )

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
        """Draw one image per caption, ``[batch, 3, size, size]`` in ``[-1, 1]``.

        The weights must be whole: see `callbacks.whole`.
        """
        ids = fields["input_ids"].to(self.device)
        empty = torch.tensor(self.empty_ids, device=self.device).expand_as(ids)
        request = SampleRequest(
            noise=starting_noise(self.seed, len(ids), self.latent_shape, self.device),
            num_steps=num_steps,
            conditions={"context": self.encode_captions(ids), **self.more_conditions(fields)},
            guidance=Guidance(
                scale=guidance, unconditional={"context": self.encode_captions(empty)}
            ),
            self_conditioning=self.spec.self_conditioning,
        )
        scheduler = DDIMScheduler.from_config(self.scheduler.config)
        return self.decode(sample(self.denoiser(), scheduler, request))

    def pipeline_parts(self, source: Source) -> dict[str, Any]:
        """What a diffusers pipeline has beside its backbone."""
        return {
            "vae": self.vae,
            "text_encoder": self.text,
            "tokenizer": source.load(CLIPTokenizer, "tokenizer"),
            "scheduler": self.scheduler,
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }

    def denoiser(self) -> Any:
        """What turns noisy latents and conditions into the model's output."""
        return backbone_denoiser(self.spec.backbones[0])

    def more_conditions(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the denoiser reads besides the caption."""
        return {}

    @torch.no_grad()
    def encode_captions(self, ids: Tensor) -> Tensor:
        """Encoded captions ``[batch, tokens, width]``."""
        encoded: Tensor = self.text(input_ids=ids).last_hidden_state
        return encoded

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images ``[batch, 3, size, size]`` of scaled latents, clamped to ``[-1, 1]``."""
        config: Any = self.vae.config
        latents = latents / config.scaling_factor + (config.shift_factor or 0.0)
        images: Tensor = self.vae.decode(latents, return_dict=False)[0]
        return images.clamp(-1.0, 1.0)


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

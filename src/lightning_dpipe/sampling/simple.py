"""Sampling in one process: a diffusers scheduler drives a denoiser, with classifier-free guidance.

In:     starting noise ``[batch, channels, ...]``, conditions by name, a scheduler.
Out:    clean latents of the same shape.
Source: guidance: Ho & Salimans, arXiv 2207.12598; self-conditioned sampling: Chen et al.,
        arXiv 2208.04202, algorithm 2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Backbone, SelfConditioning

Denoiser = Callable[[Mapping[str, Tensor]], Tensor]
"""Named tensors, each ``[batch, ...]``, to the model's output ``[batch, channels, ...]``."""


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Classifier-free guidance: ``unconditional + scale * (conditional - unconditional)``.

    `unconditional` holds, under the names of the conditions, what they are without a condition.
    Scale 1 is plain conditional sampling and runs the model once a step instead of twice.
    """

    scale: float
    unconditional: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """What to sample.

    Attributes:
        noise: Unit normal starting noise, ``[batch, channels, ...]``.
        num_steps: Steps of the scheduler.
        conditions: What the denoiser reads besides noisy latents and timestep, by name.
        guidance: None samples without guidance.
        self_conditioning: Feeds each step's estimate to the next one.
        timetable: More arguments of the scheduler's ``set_timesteps`` (flow: mu, sigmas).
    """

    noise: Tensor
    num_steps: int
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    guidance: Guidance | None = None
    self_conditioning: SelfConditioning | None = None
    timetable: Mapping[str, Any] = field(default_factory=dict)


def backbone_denoiser(backbone: Backbone, *, out: str = "out") -> Denoiser:
    """Run a backbone's layers one after the other over the named tensors; `out` is the result."""

    def denoise(tensors: Mapping[str, Tensor]) -> Tensor:
        values = dict(tensors)
        for layer in backbone.layers:
            missing = [name for name in layer.reads if name not in values]
            if missing:
                raise SpecError(
                    f"layer {backbone.name}.{layer.name} reads {', '.join(missing)}, which neither "
                    "the conditions nor an earlier layer provide; pass it as a condition"
                )
            result = layer.module(*(values[name] for name in layer.reads))
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(layer.writes, results, strict=True))
        return values[out]

    return denoise


@torch.no_grad()
def sample(
    denoise: Denoiser,
    scheduler: Any,
    request: SampleRequest,
    *,
    noisy: str = "noisy",
    timestep: str = "timestep",
) -> Tensor:
    """Integrate from noise to clean latents, ``[batch, channels, ...]``.

    Args:
        denoise: The model in eval mode.
        scheduler: A fresh diffusers scheduler; its prediction type is the model's.
        request: What to sample.
        noisy: Name under which the denoiser reads the noisy latents.
        timestep: Name under which it reads the timesteps, ``[batch]``.

    Raises:
        SpecError: A guidance condition is missing or has another shape than the conditional one.
    """
    guidance = request.guidance if request.guidance and request.guidance.scale != 1.0 else None
    if guidance:
        _check_guidance(request.conditions, guidance)
    scheduler.set_timesteps(request.num_steps, device=request.noise.device, **request.timetable)
    x = request.noise * getattr(scheduler, "init_noise_sigma", 1.0)
    feedback = request.self_conditioning
    estimate = None if feedback is None else x.new_zeros((len(x), *feedback.shape))
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        tensors = {noisy: scaled, timestep: t.expand(len(x)), **request.conditions}
        if feedback is not None and estimate is not None:
            tensors[feedback.writes] = estimate
        out = _guided(denoise, tensors, guidance)
        if feedback is not None:
            estimate = feedback.estimate(out, scaled, tensors[timestep])
        x = scheduler.step(out[:, : x.shape[1]], t, x, return_dict=False)[0]
    return x


def _guided(denoise: Denoiser, tensors: Mapping[str, Tensor], guidance: Guidance | None) -> Tensor:
    """Run both branches as one batch of twice the size and combine them."""
    if guidance is None:
        return denoise(tensors)
    both = {
        name: torch.cat([value, guidance.unconditional.get(name, value)])
        for name, value in tensors.items()
    }
    conditional, unconditional = denoise(both).chunk(2)
    return torch.lerp(unconditional, conditional, guidance.scale)


def _check_guidance(conditions: Mapping[str, Tensor], guidance: Guidance) -> None:
    for name, value in guidance.unconditional.items():
        expected = list(conditions[name].shape) if name in conditions else None
        if list(value.shape) != expected:
            raise SpecError(
                f"guidance gives {name!r} with shape {list(value.shape)}, the condition has "
                f"{expected}; give one unconditional row per sample under a condition's name"
            )

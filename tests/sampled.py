"""Tiny transformers of four families, what they are conditioned on, and the library's own sampling.

Random weights, seeds fixed. `Case.library` is diffusers' pipeline (for DiT, whose pipeline must
decode, its loop) and knows nothing of stages.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers import (
    DDIMScheduler,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from lightning_dpipe.models.flux import pack, unpack
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.sampling.plan import SamplingPlan
from lightning_dpipe.sampling.rows import balanced_stages
from lightning_dpipe.sampling.sampler import sample
from lightning_dpipe.sampling.simple import Guidance, SampleRequest
from lightning_dpipe.sampling.solver import SolverOptions
from ranks import run_threads

STEPS, WORDS, SCALE = 4, 5, 4.5
_BUILDING = threading.Lock()


def ddim() -> Any:
    return DDIMScheduler()


def dpm() -> Any:
    return DPMSolverMultistepScheduler()


def flow_euler() -> Any:
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def flow_dpm() -> Any:
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def shifted_euler() -> Any:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def shifted_dpm() -> Any:
    return DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )


def shaken(model: Any) -> Any:
    """Weights that start at zero would hide what is wrong."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model.eval()


def pixart(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 8,
        "num_layers": 4, "sample_size": 8, "cross_attention_dim": 24, "caption_channels": 12,
    }  # fmt: skip
    return shaken(PixArtTransformer2DModel(**{**config, **changes}))


def dit(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8,
        "num_layers": 4, "sample_size": 12, "num_embeds_ada_norm": 10,
    }  # fmt: skip
    return shaken(DiTTransformer2DModel(**{**config, **changes}))


def sd3(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
        "num_layers": 4, "sample_size": 8, "caption_projection_dim": 16, "joint_attention_dim": 12,
        "pooled_projection_dim": 6, "pos_embed_max_size": 10,
    }  # fmt: skip
    return shaken(SD3Transformer2DModel(**{**config, **changes}))


def sd35(**changes: Any) -> Any:
    return sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1), **changes)


def flux(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "num_layers": 2,
        "num_single_layers": 2, "joint_attention_dim": 12, "pooled_projection_dim": 6,
        "guidance_embeds": True, "axes_dims_rope": (2, 2, 4),
    }  # fmt: skip
    return shaken(FluxTransformer2DModel(**{**config, **changes}))


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pixart_pipeline(model: Any, scheduler: Any, r: SampleRequest, more: dict[str, Any]) -> Tensor:
    pipeline = _quiet(
        PixArtAlphaPipeline(
            tokenizer=None, text_encoder=None, vae=None, transformer=model, scheduler=scheduler
        )
    )
    c, u = r.conditions, r.guidance.unconditional if r.guidance else {}
    made: Tensor = pipeline(
        prompt=None,
        negative_prompt=None,
        prompt_embeds=c["context"],
        prompt_attention_mask=c["mask"],
        negative_prompt_embeds=u.get("context"),
        negative_prompt_attention_mask=u.get("mask", c["mask"]),
        num_inference_steps=r.num_steps,
        guidance_scale=r.guidance.scale if r.guidance else 1.0,
        latents=r.noise.clone(),
        height=r.noise.shape[2] * 8,
        width=r.noise.shape[3] * 8,
        use_resolution_binning=False,
        output_type="latent",
        return_dict=False,
        **more,
    )[0]
    return made


def sd3_pipeline(model: Any, scheduler: Any, r: SampleRequest, more: dict[str, Any]) -> Tensor:
    none = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3",
         "tokenizer_3", "vae")
    )  # fmt: skip
    pipeline = _quiet(StableDiffusion3Pipeline(transformer=model, scheduler=scheduler, **none))
    c, u = r.conditions, r.guidance.unconditional if r.guidance else {}
    made: Tensor = pipeline(
        prompt_embeds=c["context"],
        pooled_prompt_embeds=c["pooled"],
        negative_prompt_embeds=u.get("context"),
        negative_pooled_prompt_embeds=u.get("pooled"),
        num_inference_steps=r.num_steps,
        guidance_scale=r.guidance.scale if r.guidance else 1.0,
        latents=r.noise.clone(),
        height=r.noise.shape[2] * 8,
        width=r.noise.shape[3] * 8,
        output_type="latent",
        return_dict=False,
        **more,
    )[0]
    return made


def flux_pipeline(model: Any, scheduler: Any, r: SampleRequest, more: dict[str, Any]) -> Tensor:
    none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae"))
    pipeline = _quiet(FluxPipeline(transformer=model, scheduler=scheduler, **none))
    height, width = r.noise.shape[-2:]
    made: Tensor = pipeline(
        prompt_embeds=r.conditions["context"],
        pooled_prompt_embeds=r.conditions["pooled"],
        num_inference_steps=r.num_steps,
        guidance_scale=3.5,
        latents=pack(r.noise),
        height=height * 8,
        width=width * 8,
        output_type="latent",
        return_dict=False,
        **more,
    )[0]
    return unpack(made, height, width)


def dit_loop(model: Any, scheduler: Any, r: SampleRequest, more: dict[str, Any]) -> Tensor:
    scheduler.set_timesteps(r.num_steps)
    x, label = r.noise * scheduler.init_noise_sigma, r.conditions["label"]
    if r.guidance is not None:
        label = torch.cat([label, r.guidance.unconditional["label"]])
    for t in scheduler.timesteps:
        double = torch.cat([x, x]) if r.guidance is not None else x
        double = scheduler.scale_model_input(double, t)
        with torch.no_grad():
            out = model(double, timestep=t.expand(len(double)), class_labels=label).sample
        out = out[:, : x.shape[1]]
        if r.guidance is not None:
            conditional, unconditional = out.chunk(2)
            out = unconditional + r.guidance.scale * (conditional - unconditional)
        x = scheduler.step(out, t, x, return_dict=False, **more)[0]
    return x


@dataclass(frozen=True)
class Case:
    """One family: how to build it, what it reads, how the library samples it."""

    name: str
    build: Callable[..., Any]
    library: Callable[[Any, Any, SampleRequest, dict[str, Any]], Tensor]
    schedulers: tuple[Callable[[], Any], ...]
    guided: bool = True

    def options(self, scheduler: Any, r: SampleRequest) -> SolverOptions:
        """What the pipeline passes to ``set_timesteps``."""
        if self.name != "flux":
            return SolverOptions()
        config = scheduler.config
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        known = {name: config[name] for name in names if name in config}
        given: dict[str, Any] = {"mu": calculate_shift(pack(r.noise).shape[1], *known.values())}
        if not config.get("use_flow_sigmas", False):
            given["sigmas"] = np.linspace(1.0, 1 / r.num_steps, r.num_steps)
        return SolverOptions(timesteps=given)

    def request(
        self,
        *,
        batch: int = 1,
        size: tuple[int, int] | None = None,
        words: int = WORDS,
        steps: int = STEPS,
        guided: bool | None = None,
        seed: int = 1,
    ) -> SampleRequest:
        made = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made)

        height, width = size or ((12, 12) if self.name == "dit" else (12, 8))
        noise = draw(batch, 4, height, width)
        sides: list[dict[str, Tensor]] = []
        for _ in range(2):
            if self.name == "dit":
                sides.append({"label": torch.randint(0, 10, (batch,), generator=made)})
                continue
            side = {"context": draw(batch, words, 12)}
            if self.name == "pixart":
                side["mask"] = torch.ones(batch, words)
                side["mask"][:, words - 2 :] = 0
            else:
                side["pooled"] = draw(batch, 6)
            sides.append(side)
        conditions, unconditional = sides
        if self.name == "dit":
            unconditional["label"] = torch.full((batch,), 10)
        if self.name == "flux":
            conditions["guidance"] = torch.full((batch,), 3.5)
        guided = self.guided if guided is None else guided
        return SampleRequest(
            noise=noise,
            num_steps=steps,
            conditions=conditions,
            guidance=Guidance(scale=SCALE, unconditional=unconditional) if guided else None,
        )


CASES = {
    c.name: c
    for c in (
        Case("pixart", pixart, pixart_pipeline, (ddim, dpm)),
        Case("dit", dit, dit_loop, (ddim, dpm)),
        Case("sd3", sd3, sd3_pipeline, (flow_euler, flow_dpm)),
        Case("sd35", sd35, sd3_pipeline, (flow_euler, flow_dpm)),
        Case("flux", flux, flux_pipeline, (shifted_euler, shifted_dpm), guided=False),
    )
}


@cache
def model_of(name: str) -> Any:
    """The family's model, built once: tests leave it as it was."""
    torch.manual_seed(0)
    return CASES[name].build()


def stages_of(source: Any, request: SampleRequest, num_stages: int) -> tuple[tuple[int, int], ...]:
    with _BUILDING:
        return balanced_stages(source, request.conditions, num_stages)


def draw(
    source: Any,
    scheduler: Any,
    request: SampleRequest,
    *,
    ranks: int = 1,
    stages: int | None = None,
    options: SolverOptions | None = None,
    hub: ThreadHub | None = None,
    on_step: Any = None,
    **plan: Any,
) -> Tensor:
    """Sample over thread ranks; `stages` (by default one a rank) go around the ranks in turn."""
    count = stages or ranks
    made = SamplingPlan(
        stages=stages_of(source, request, count),
        ranks=tuple(i % ranks for i in range(count)),
        **plan,
    )
    options = options or SolverOptions()
    if ranks == 1:
        drawn = sample(source, scheduler, request, made, options=options, on_step=on_step)
        assert drawn is not None
        return drawn

    def body(rank: int, hub: ThreadHub) -> Tensor | None:
        return sample(
            source,
            scheduler,
            request,
            made,
            options=options,
            transport=hub.transport(rank),
            rank=rank,
            on_step=on_step,
        )

    found = run_threads(body, ranks, hub=hub, timeout_s=60.0)
    head = made.owners[-1]
    assert [rank for rank, x in enumerate(found) if x is not None] == [head]
    last: Tensor = found[head]
    return last


STALE: dict[str, Any] = {"mode": "pipefusion", "patches": 3, "warmup": 1}
"""A plan of three patches."""


def options_of(case: Case, request: SampleRequest) -> SolverOptions:
    """Of the family's first scheduler."""
    return case.options(case.schedulers[0](), request)


def drawn(case: Case, request: SampleRequest, **more: Any) -> Tensor:
    """Draw from the family's model with its first scheduler."""
    options = options_of(case, request)
    return draw(model_of(case.name), case.schedulers[0](), request, options=options, **more)


def sites(model: Any) -> list[Any]:
    """The model's attention modules."""
    return [m for m in model.modules() if hasattr(m, "processor")]

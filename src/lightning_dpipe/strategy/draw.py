"""Images of a configured module, drawn in one process: exactly, or as PipeFusion's patches would.

In:     a module with whole weights, batch fields, how to draw.
Out:    images ``[batch, channels, height, width]`` in ``[-1, 1]``.

What patches give depends on their number and the warm-up, never on the number of ranks, so one
process draws what a pipeline would.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.sampling.plan import Mode, SamplingPlan
from lightning_dpipe.sampling.rows import backbone_of
from lightning_dpipe.sampling.sampler import sample
from lightning_dpipe.sampling.simple import SampleRequest
from lightning_dpipe.sampling.solver import SolverOptions
from lightning_dpipe.strategy.module import DiffusionModule


@runtime_checkable
class DrawsInPatches(Protocol):
    """A module whose images `sampling.sampler` can draw."""

    def sample_request(
        self, fields: Mapping[str, Tensor], *, num_steps: int, guidance: float
    ) -> SampleRequest:
        """What is asked of the sampler."""

    def sampler(self) -> Any:
        """A fresh scheduler."""

    def decode(self, latents: Tensor) -> Tensor:
        """Images of what the sampler returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How to draw; `patches` and `warmup` are those of `SamplingPlan`, in mode pipefusion only."""

    num_steps: int
    guidance: float
    mode: Mode = Mode.EXACT
    patches: int = 1
    warmup: int = 1


@torch.no_grad()
def draw(module: DiffusionModule, fields: Mapping[str, Tensor], drawing: Drawing) -> Tensor:
    """Draw one image per row of the fields.

    Raises:
        UnsupportedError: The module cannot draw, or not in this mode.
        PlanError: The image has fewer rows than patches.
    """
    options = {"num_steps": drawing.num_steps, "guidance": drawing.guidance}
    if drawing.mode is Mode.EXACT:
        exact: Any = getattr(module, "draw_samples", None)
        if exact is None:
            raise UnsupportedError(
                f"{type(module).__name__} has no draw_samples(fields, num_steps=, guidance=); "
                "define it to draw images"
            )
        images: Tensor = exact(fields, **options)
        return images
    if not isinstance(module, DrawsInPatches):
        raise UnsupportedError(
            f"{type(module).__name__} cannot be drawn in mode pipefusion; DiT, PixArt, SD3 and "
            "Flux modules can: use mode=exact"
        )
    request = module.sample_request(fields, num_steps=drawing.num_steps, guidance=drawing.guidance)
    backbone = backbone_of(module, request.conditions)
    plan = SamplingPlan(
        stages=((0, len(backbone.layers)),),
        mode=drawing.mode,
        patches=drawing.patches,
        warmup=drawing.warmup,
    )
    latents = sample(
        backbone,
        module.sampler(),
        request,
        plan,
        options=SolverOptions(timesteps=request.timetable),
    )
    assert latents is not None, "the only rank has the last stage"
    return module.decode(latents)

"""One sampling call as it is laid out before anything is computed; each rank derives its part.

In:     what to sample from, a scheduler, a request, a plan.
Out:    a `Call` and the number by which ranks compare theirs.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_dpipe.core.errors import PlanError, SpecError
from lightning_dpipe.sampling.parts import RowModel, View
from lightning_dpipe.sampling.patches import PatchPlan, cut_rows
from lightning_dpipe.sampling.plan import Mode, SamplingPlan
from lightning_dpipe.sampling.routes import Traffic, find_routes
from lightning_dpipe.sampling.rows import Source, backbone_of, row_model
from lightning_dpipe.sampling.simple import SampleRequest
from lightning_dpipe.sampling.solver import SolverOptions, check_solver, prepared
from lightning_dpipe.sampling.units import Unit, UnitTimeline, list_units, successors, timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What all ranks agree on.

    Attributes:
        plan: As given.
        model: What is sampled.
        request: As given.
        options: As given.
        scheduler: A copy with its timesteps set.
        patches: Of this image; one in mode exact.
        units: All of them, in order.
        timeline: Who does what when, predicted.
        traffic: All messages.
        noises: Starting noise, by group.
        inputs: Conditions as the model reads them, by group.
        scale: Of guidance; None: one branch.
    """

    plan: SamplingPlan
    model: RowModel
    request: SampleRequest
    options: SolverOptions
    scheduler: Any
    patches: PatchPlan
    units: tuple[Unit, ...]
    timeline: UnitTimeline
    traffic: Traffic
    noises: tuple[Tensor, ...]
    inputs: tuple[Mapping[str, Tensor], ...]
    scale: float | None

    @property
    def stale(self) -> bool:
        """Whether patches are sampled."""
        return self.plan.mode == Mode.PIPEFUSION

    def digest(self) -> int:
        """A number that two ranks share only if they mean the same call."""
        traffic = self.traffic
        what = (
            self.plan.stages,
            self.plan.owners,
            self.patches.cuts,
            self.units,
            traffic.batches,
            traffic.views,
            traffic.sample_dtype,
            traffic.dtype,
            self.scale,
            type(self.scheduler).__name__,
            self.scheduler.timesteps.tolist(),
            tuple(layer.name for layer in self.model.layers),
        )
        return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:7], "big")


def open_call(
    source: Source,
    scheduler: Any,
    request: SampleRequest,
    plan: SamplingPlan,
    options: SolverOptions,
) -> Call:
    """Check all that can be checked and lay the call out.

    Raises:
        PlanError: Stages, patches or groups do not fit the model or the batch.
        SpecError: A condition is missing, or guidance does not fit it.
        UnsupportedError: The model is of no known family, or the solver cannot work on patches.
    """
    noise, guidance = request.noise, request.guidance
    scale = guidance.scale if guidance is not None and guidance.scale != 1.0 else None
    model = row_model(backbone_of(source, request.conditions), request.conditions)
    plan.check(len(model.layers))
    _check_request(model, request, options)
    grid = _grid(model, noise)
    stale = plan.mode == Mode.PIPEFUSION
    patches = cut_rows(grid[0], plan.patches if stale else 1)
    made = prepared(scheduler, request.num_steps, options, noise.device)
    if stale:
        check_solver(made, options, channels=noise.shape[1])
    groups = _groups(plan, len(noise))
    units = list_units(
        num_steps=len(made.timesteps),
        num_patches=len(patches) if stale else None,
        warmup=plan.warmup,
        groups=plan.groups,
    )
    return Call(
        plan=plan,
        model=model,
        request=request,
        options=options,
        scheduler=made,
        patches=patches,
        units=units,
        timeline=timeline(
            units,
            plan.owners,
            share={m: (b - a) / grid[0] for m, (a, b) in enumerate(pairwise(patches.cuts))},
        ),
        traffic=Traffic(
            model=model,
            routes=find_routes(model, plan.stages),
            owners=plan.owners,
            following=successors(units),
            views=_views(model, request, patches, grid),
            batches=tuple((b - a, (b - a) * (1 if scale is None else 2)) for a, b in groups),
            sample=(noise.shape[1], noise.shape[3]),
            sample_dtype=str(noise.dtype).removeprefix("torch."),
            dtype=str(model.dtype).removeprefix("torch."),
        ),
        noises=tuple(noise[a:b] for a, b in groups),
        inputs=tuple(_inputs(model, request, scale is not None, a, b) for a, b in groups),
        scale=scale,
    )


def _check_request(model: RowModel, request: SampleRequest, options: SolverOptions) -> None:
    if request.self_conditioning is not None and model.estimate is None:
        raise SpecError(
            "the request has self-conditioning, the backbone reads no estimate; build its layers "
            "with self_cond, or leave self_conditioning out"
        )
    if options.one_an_image and len(options.generator) != len(request.noise):
        raise SpecError(
            f"{len(options.generator)} generators for {len(request.noise)} images; give "
            "one an image, or one for all"
        )


def _grid(model: RowModel, noise: Tensor) -> tuple[int, int]:
    """Token rows and columns of the image."""
    height, width = noise.shape[-2:]
    if height % model.patch or width % model.patch:
        raise SpecError(
            f"the latent is {height}x{width}; the model cuts it into squares of {model.patch}: use "
            f"multiples of {model.patch}"
        )
    if model.square and height != width:
        raise SpecError(f"the latent is {height}x{width}; this model draws squares only")
    return height // model.patch, width // model.patch


def _groups(plan: SamplingPlan, batch: int) -> tuple[tuple[int, int], ...]:
    """Image ranges of the groups, sizes differing by one at most."""
    if plan.groups > batch:
        raise PlanError(
            f"{plan.groups} groups of a batch of {batch}; legal are 1 to {batch}, an image is not "
            "divided"
        )
    return tuple(pairwise(cut_rows(batch, plan.groups).cuts))


def _views(
    model: RowModel, request: SampleRequest, patches: PatchPlan, grid: tuple[int, int]
) -> dict[int | None, View]:
    words = 0 if model.context is None else request.conditions[model.context].shape[1]
    found = {}
    for m in (None, *range(len(patches))):
        first, last = patches.rows(m)
        text = m is None or m == 0
        found[m] = View(first=first, last=last, grid=grid, words=words, text=text)
    return found


def _inputs(
    model: RowModel, request: SampleRequest, guided: bool, first: int, last: int
) -> dict[str, Tensor]:
    """Conditions of images ``[first, last)``, both branches of each one after the other."""
    found = {}
    for name in model.inputs:
        value = request.conditions[name]
        if len(value) != len(request.noise):
            raise SpecError(
                f"condition {name!r} has {len(value)} rows for {len(request.noise)} images; give "
                "one row an image"
            )
        found[name] = value[first:last]
        if guided:
            assert request.guidance is not None
            other = request.guidance.unconditional.get(name, value)
            if other.shape != value.shape:
                raise SpecError(
                    f"guidance gives {name!r} with shape {list(other.shape)}, the condition has "
                    f"{list(value.shape)}; give one unconditional row per image"
                )
            branches = (other[first:last], value[first:last])
            found[name] = torch.cat(branches if model.unconditional_first else branches[::-1])
    return found

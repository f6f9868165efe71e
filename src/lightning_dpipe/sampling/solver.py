"""Solvers over patches: one copy of a diffusers scheduler a patch, each stepped on its own rows.

In:     a fresh scheduler of any class whose step works on every pixel alone.
Out:    solvers whose steps on patches add up to the step on the whole image, noise included.
A copy's history is that of its rows from the first step on, so nothing is sliced and the step index
moves once a step. What cannot work is refused by name.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.sampling.patches import PatchPlan

_SEVERAL_CALLS = {"PNDMScheduler", "ScoreSdeVeScheduler", "KarrasVeScheduler"}
"""Solvers of order 1 that call the model several times for one step, or correct after it."""

_TRIAL_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class SolverOptions:
    """What a diffusers pipeline would pass to its scheduler.

    Attributes:
        timesteps: Arguments of ``set_timesteps`` beside the number of steps (``sigmas``, ``mu``);
            with ``sigmas`` or ``timesteps`` the number is left out, as pipelines do.
        step: Arguments of ``step`` (``eta``).
        generator: Of the noise that stochastic solvers add.
    """

    timesteps: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)
    generator: Any = None

    @property
    def one_an_image(self) -> bool:
        """Whether every image has a generator of its own."""
        return isinstance(self.generator, list) and len(self.generator) > 1


def prepared(scheduler: Any, num_steps: int, options: SolverOptions, device: torch.device) -> Any:
    """A copy of the scheduler with its timesteps set; the one given stays as it is."""
    made = copy.deepcopy(scheduler)
    given = dict(options.timesteps)
    if not {"sigmas", "timesteps"} & set(given):
        given["num_inference_steps"] = num_steps
    made.set_timesteps(device=device, **given)
    return made


def check_solver(scheduler: Any, options: SolverOptions, *, channels: int) -> None:
    """Refuse a prepared solver that patches cannot use.

    The last word has a trial: on a small latent, steps on two halves are compared with steps on the
    whole.

    Raises:
        UnsupportedError: It looks at several pixels at once, or calls the model several times.
    """
    name = type(scheduler).__name__
    config = scheduler.config
    if config.get("thresholding", False):
        raise UnsupportedError(
            f"{name} with thresholding=True looks at all pixels of an image; patches need a solver "
            "that works on each pixel alone: set thresholding=False or use mode='exact'"
        )
    order = getattr(scheduler, "order", 1)
    if order != 1 or name in _SEVERAL_CALLS:
        raise UnsupportedError(
            f"{name} calls the model several times a step; patches need one call a step: use "
            "DDIM, DPM-Solver++ (multistep), UniPC or flow Euler, or mode='exact'"
        )
    if not _elementwise(scheduler, options, channels):
        raise UnsupportedError(
            f"{name}: its steps on two halves of a latent differ from its step on the whole; "
            "patches need a solver that works on each pixel alone: use mode='exact'"
        )


def _elementwise(scheduler: Any, options: SolverOptions, channels: int) -> bool:
    """Compare steps on halves with steps on the whole, over all timesteps."""
    made = torch.Generator().manual_seed(0)
    device = scheduler.timesteps.device
    x, *outs = (
        torch.randn(1, channels, _TRIAL_ROWS, 2, generator=made).to(device)
        for _ in range(1 + len(scheduler.timesteps))
    )
    found = []
    for cuts in ((0, _TRIAL_ROWS), (0, 1, _TRIAL_ROWS)):
        generator = torch.Generator().manual_seed(1)
        trial = SolverOptions(step=options.step, generator=generator)
        solvers = PatchSolvers(scheduler, PatchPlan(cuts), 1, x, trial)
        for step, out in enumerate(outs):
            for m in range(len(cuts) - 1):
                first, last = cuts[m], cuts[m + 1]
                solvers.step(step, m, out[:, :, first:last])
        found.append(solvers.latents)
    whole, halves = found
    return torch.allclose(whole, halves, rtol=1e-4, atol=1e-5, equal_nan=True)


def group_solvers(
    scheduler: Any, plan: PatchPlan, patch: int, noises: Sequence[Tensor], options: SolverOptions
) -> list["PatchSolvers"]:
    """Solvers of all groups of a batch, whose starting noise is `noises`.

    One generator draws for the whole batch at once, so that its numbers do not depend on the
    groups; of a list with one generator an image, each group takes its own.
    """
    made: list[PatchSolvers] = []
    joint = Draws(sum(len(noise) for noise in noises))
    first = 0
    for noise in noises:
        own, draws = options, joint
        if options.one_an_image:
            generators = options.generator[first : first + len(noise)]
            own, draws = replace(options, generator=generators), Draws(None)
        made.append(PatchSolvers(scheduler, plan, patch, noise, own, draws=draws, first=first))
        first += len(noise)
    return made


@dataclass(slots=True, eq=False)
class Draws:
    """The noise of one step, drawn for whole images by whoever comes first.

    `batch` is how many images one draw is for; None: as many as are asked for.
    """

    batch: int | None
    step: int = -1
    drawn: list[Tensor] = field(default_factory=list)

    def at(self, step: int) -> "Draws":
        """Forget the step before."""
        if step != self.step:
            self.step, self.drawn = step, []
        return self


class PatchSolvers:
    """The latents of one group of images and the solvers of their patches.

    Args:
        scheduler: Prepared; it is copied for every patch.
        plan: Patches in token rows; one patch for whole images.
        patch: Latent pixels a token row.
        noise: Unit normal ``[batch, channels, height, width]``.
        options: Arguments of every step.
        draws: Shared by the groups of a batch; None: this is the whole batch.
        first: Place of the group's first image in the batch.
    """

    def __init__(
        self,
        scheduler: Any,
        plan: PatchPlan,
        patch: int,
        noise: Tensor,
        options: SolverOptions,
        *,
        draws: Draws | None = None,
        first: int = 0,
    ) -> None:
        x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
        self.cuts = tuple(row * patch for row in plan.cuts)
        self.timesteps = scheduler.timesteps
        # One tensor a patch, replaced and never written to: solvers keep what they are given.
        self.parts = [x[:, :, a:b].contiguous() for a, b in pairwise(self.cuts)]
        self.copies = [copy.deepcopy(scheduler) for _ in range(len(plan))]
        self.options = options
        takes = inspect.signature(scheduler.step).parameters
        self._more = dict(options.step)
        if "generator" in takes:
            self._more["generator"] = options.generator
        self._draws = draws or Draws(None)
        self._images = slice(first, first + len(noise))

    @property
    def latents(self) -> Tensor:
        """All rows, ``[batch, channels, height, width]``."""
        return torch.cat(self.parts, dim=2) if len(self.parts) > 1 else self.parts[0]

    def patches(self, patch: int | None) -> Sequence[int]:
        """The patches that a unit covers."""
        return range(len(self.copies)) if patch is None else (patch,)

    def rows(self, patch: int | None) -> slice:
        """Latent rows of a unit."""
        if patch is None:
            return slice(0, self.cuts[-1])
        return slice(self.cuts[patch], self.cuts[patch + 1])

    def model_input(self, step: int, patch: int | None) -> Tensor:
        """What the model reads of a unit's rows at `step`, contiguous."""
        t = self.timesteps[step]
        parts = []
        for m in self.patches(patch):
            scale = getattr(self.copies[m], "scale_model_input", None)
            parts.append(self.parts[m] if scale is None else scale(self.parts[m], t))
        return (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]).contiguous()

    def step(self, step: int, patch: int | None, out: Tensor) -> None:
        """Advance a unit's rows by one step, ``out`` ``[batch, channels, rows, width]``."""
        start = self.rows(patch).start
        for m in self.patches(patch):
            rows = self.rows(m)
            piece = out[:, :, rows.start - start : rows.stop - start]
            with _NoiseRows(self._draws.at(step), self._images, rows, self.cuts[-1]):
                self.parts[m] = self.copies[m].step(
                    piece.contiguous(),
                    self.timesteps[step],
                    self.parts[m],
                    return_dict=False,
                    **self._more,
                )[0]


class _NoiseRows(TorchFunctionMode):
    """Inside, ``torch.randn`` draws for whole images and returns a group's and a patch's part.

    So both get the numbers that they get in one process. It applies to this thread only.
    """

    def __init__(self, draws: Draws, images: slice, rows: slice, height: int) -> None:
        super().__init__()
        self.draws = draws
        self.images = images
        self.rows = rows
        self.height = height
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.randn:
            return func(*args, **kwargs)
        size = tuple(args[0]) if len(args) == 1 else args
        batch, drawn = self.draws.batch, self.draws.drawn
        self.calls += 1
        if self.calls > len(drawn):
            whole = (batch or size[0], *size[1:-2], self.height, size[-1])
            drawn.append(torch.randn(whole, **kwargs))
        found = drawn[self.calls - 1][..., self.rows, :]
        return found if batch is None else found[self.images]

"""Latent consistency distillation: every point of a teacher's trajectory maps to its end.

In:     clean latents, draw keys, the frozen teacher's outputs with and without the caption, the
        student's outputs at two points of one trajectory.
Out:    the two points (frozen work), and one loss per sample.
Source: LCM: Luo et al., arXiv 2310.04378, section 4 and algorithm 1: boundary scalings (4.1), one
        guided DDIM step of the teacher (4.2) over several timesteps at once (4.3). Consistency
        models: Song et al., arXiv 2303.01469.

What differs from algorithm 1:

* The target is the student itself without gradient, not an average of its past weights: decay 0,
  which Song & Dhariwal, arXiv 2310.14189, section 3.2, recommend for consistency models, and which
  diffusers' distillation of LCM-LoRA does. An average would be trained state that every stage has
  to keep in step, for a forward that costs the same.
* The guidance is one number a run, so the student needs no embedding of it.

A frozen target would be no substitute: the student would only learn the teacher's one-step guess.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.models.spec import DRAW_KEY, FrozenComponent, Layer, Loss
from lightning_dpipe.objective.draws import integers, normal
from lightning_dpipe.objective.losses import drop_learned_sigma
from lightning_dpipe.objective.schedule import NoiseSchedule, Prediction

SIGMA_DATA, TIMESTEP_SCALING = 0.5, 10.0


def boundary_scalings(timestep: Tensor) -> tuple[Tensor, Tensor]:
    """``(c_skip, c_out)`` at timesteps ``[batch]``, float32; (1, 0) at 0: the end maps to itself.

    The constants are those of LCM's code and of diffusers' ``LCMScheduler``.
    """
    scaled = timestep.to(torch.float32) * TIMESTEP_SCALING
    square = scaled.square() + SIGMA_DATA**2
    return SIGMA_DATA**2 / square, scaled / square.sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class Consistency:
    """The pieces of the objective for one noise schedule.

    Attributes:
        schedule: The teacher's forward process.
        seed: The run's seed.
        num_solver_steps: Steps of the solver over the whole schedule; the trajectory's two points
            are one of them apart.
        guidance: Scale of the teacher's guidance, 1 is none; the paper's omega is one less.
        huber: Where the pseudo-Huber loss turns from a square to an absolute value.

    Raises:
        SpecError: A number is out of range.
        UnsupportedError: A flow schedule.
    """

    schedule: NoiseSchedule
    seed: int
    num_solver_steps: int = 50
    guidance: float = 7.5
    huber: float = 1e-3

    def __post_init__(self) -> None:
        if self.schedule.prediction is Prediction.FLOW:
            raise UnsupportedError(
                "consistency distillation here takes DDIM steps, which a flow-matching schedule "
                "does not have; use a teacher of the DDPM family"
            )
        if not 1 <= self.num_solver_steps <= self.schedule.num_steps:
            raise SpecError(
                f"num_solver_steps={self.num_solver_steps} for a schedule of "
                f"{self.schedule.num_steps} steps; expected a number from 1 to that"
            )
        if not self.huber > 0:
            raise SpecError(f"huber={self.huber}; expected a positive number (0.001 in LCM's code)")

    @property
    def grid(self) -> npt.NDArray[np.int64]:
        """The solver's timesteps, ascending; the last is the schedule's noisiest."""
        stride = self.schedule.num_steps // self.num_solver_steps
        last = self.schedule.num_steps - 1
        return last - stride * np.arange(self.num_solver_steps, dtype=np.int64)[::-1]

    def earlier(self, timestep: Tensor) -> Tensor:
        """Where a solver's step from `timestep` int64 ``[batch]`` ends; at least 0."""
        stride = self.schedule.num_steps // self.num_solver_steps
        return (timestep - stride).clamp(min=0)

    @torch.no_grad()
    def draw(self, latents: Tensor, draw_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A noisy point and both timesteps, ``(noisy, timestep, earlier)``, keyed by the sample."""
        place = integers(self.seed, "timestep", draw_key, self.num_solver_steps)
        timestep = torch.tensor(self.grid, device=place.device)[place].to(latents.device)
        noise = normal(self.seed, "noise", draw_key, latents.shape[1:]).to(latents.device)
        noisy = self.schedule.add_noise(latents.float(), noise, timestep).to(latents.dtype)
        return noisy, timestep, self.earlier(timestep)

    @torch.no_grad()
    def solve(
        self, noisy: Tensor, timestep: Tensor, earlier: Tensor, out: Tensor, empty_out: Tensor
    ) -> Tensor:
        """One DDIM step (eta 0) of the guided teacher from `noisy`; ``[batch, ...]`` at `earlier`.

        DDIM is linear in the output, so guiding the output is the paper's guided solver.

        Args:
            noisy: ``[batch, channels, ...]`` at `timestep`.
            timestep: int64 ``[batch]``.
            earlier: int64 ``[batch]``.
            out: The teacher's output with the caption.
            empty_out: And without.
        """
        guided = torch.lerp(empty_out.float(), out.float(), self.guidance)
        guided = drop_learned_sigma(guided, noisy.shape[1])
        x0 = self.schedule.estimate(guided, noisy.float(), timestep)
        noise = self.schedule.noise(guided, noisy.float(), timestep)
        return self.schedule.add_noise(x0, noise, earlier).to(noisy.dtype)

    def end(self, out: Tensor, noisy: Tensor, timestep: Tensor) -> Tensor:
        """The consistency function: where the trajectory through `noisy` ends, by the student."""
        shape = (-1, *[1] * (noisy.ndim - 1))
        skip, scale = (c.view(shape) for c in boundary_scalings(timestep))
        prediction = drop_learned_sigma(out, noisy.shape[1]).float()
        x0 = self.schedule.estimate(prediction, noisy.float(), timestep)
        return skip * noisy.float() + scale * x0

    def loss(
        self,
        out: Tensor,
        noisy: Tensor,
        timestep: Tensor,
        target_out: Tensor,
        solved: Tensor,
        earlier: Tensor,
    ) -> Tensor:
        """Distance of both ends, ``[batch]``; the one from `solved` is the target."""
        target = self.end(target_out.detach(), solved, earlier)
        apart = self.end(out, noisy, timestep) - target
        huber = (apart.square() + self.huber**2).sqrt() - self.huber
        return huber.flatten(1).mean(1)

    def draw_component(self, *, latents: str = "latents", name: str = "noise") -> FrozenComponent:
        """`draw` as frozen work: writes noisy, timestep, earlier."""
        layer = Layer(
            name="draw",
            module=self.draw,
            reads=(latents, DRAW_KEY),
            writes=("noisy", "timestep", "earlier"),
        )
        return FrozenComponent(name=name, layers=(layer,))

    def solver_component(
        self, *, out: str = "teacher_out", empty_out: str = "teacher_empty_out"
    ) -> FrozenComponent:
        """`solve` as frozen work: writes solved."""
        layer = Layer(
            name="ddim",
            module=self.solve,
            reads=("noisy", "timestep", "earlier", out, empty_out),
            writes=("solved",),
        )
        return FrozenComponent(name="solver", layers=(layer,))

    def pipeline_loss(self) -> Loss:
        """`loss` over the tensors above and a student's out and target_out."""
        reads = ("out", "noisy", "timestep", "target_out", "solved", "earlier")
        return Loss(fn=self.loss, reads=reads)

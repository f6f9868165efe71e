"""Consistency distillation against diffusers' schedulers and a teacher that is known exactly."""

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler, LCMScheduler
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.objective.consistency import Consistency, boundary_scalings
from lightning_dpipe.objective.schedule import NoiseSchedule

PREDICTIONS = ("epsilon", "sample", "v_prediction")
BETAS: dict[str, Any] = {
    "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
    "num_train_timesteps": 1000,
}  # fmt: skip


def made(prediction: str = "v_prediction", **changes: Any) -> Consistency:
    scheduler = DDPMScheduler(prediction_type=prediction, **BETAS)
    options: dict[str, Any] = {"seed": 3, "num_solver_steps": 50, **changes}
    return Consistency(schedule=NoiseSchedule.from_scheduler(scheduler), **options)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_boundary_scalings_are_diffusers_and_exact_at_zero() -> None:
    times = torch.arange(1000)
    theirs = [LCMScheduler().get_scalings_for_boundary_condition_discrete(t) for t in range(1000)]
    for ours, expected in zip(boundary_scalings(times), zip(*theirs, strict=True), strict=True):
        torch.testing.assert_close(ours.double(), torch.tensor(expected).double())
    skip, scale = boundary_scalings(torch.zeros(1))
    assert (float(skip), float(scale)) == (1.0, 0.0)
    noisy, out = normals(2, 4, 3, 3), normals(2, 4, 3, 3, seed=1)
    assert torch.equal(made().end(out, noisy, torch.zeros(2).long()), noisy)


@pytest.mark.parametrize("num_solver_steps", [50, 20, 7])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_solver_is_diffusers_ddim(prediction: str, num_solver_steps: int) -> None:
    """Every step of the grid, one a row; the last ends at timestep 0, not at clean data."""
    ours = made(prediction, num_solver_steps=num_solver_steps, guidance=3.0)
    theirs = DDIMScheduler(
        prediction_type=prediction, clip_sample=False, set_alpha_to_one=False, **BETAS,
        timestep_spacing="trailing",
    )  # fmt: skip
    theirs.set_timesteps(num_solver_steps)
    theirs.num_inference_steps = num_solver_steps
    grid = torch.tensor(ours.grid)
    if 1000 % num_solver_steps == 0:  # otherwise diffusers rounds each timestep
        assert theirs.timesteps.flip(0).tolist() == grid.tolist()
    noisy, out, empty = (normals(len(grid), 4, 3, 3, seed=i) for i in range(3))
    solved = ours.solve(noisy, grid, ours.earlier(grid), out, empty)
    for i, t in enumerate(grid.tolist()):
        guided = empty[i] + 3.0 * (out[i] - empty[i])
        step = theirs.step(guided, t, noisy[i], eta=0.0).prev_sample
        torch.testing.assert_close(solved[i], step, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_guiding_the_output_is_guiding_the_solver_as_the_paper_does(prediction: str) -> None:
    omega = 6.5
    plain, guided = made(prediction, guidance=1.0), made(prediction, guidance=1 + omega)
    noisy, out, empty = (normals(5, 4, 3, 3, seed=i) for i in range(3))
    times = torch.tensor(plain.grid[[0, 7, 20, 40, 49]])
    ends = plain.earlier(times)
    with_text = plain.solve(noisy, times, ends, out, out) - noisy
    without = plain.solve(noisy, times, ends, empty, empty) - noisy
    expected = noisy + (1 + omega) * with_text - omega * without
    torch.testing.assert_close(
        guided.solve(noisy, times, ends, out, empty), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_end_is_what_the_lcm_scheduler_denoises_to(prediction: str) -> None:
    theirs = LCMScheduler(prediction_type=prediction, clip_sample=False, **BETAS)
    theirs.set_timesteps(1, original_inference_steps=50)
    noisy, out = normals(1, 4, 3, 3), normals(1, 4, 3, 3, seed=1)
    (t,) = theirs.timesteps.tolist()
    denoised = theirs.step(out, t, noisy).denoised
    ours = made(prediction).end(out, noisy, torch.tensor([t]))
    torch.testing.assert_close(ours, denoised, rtol=1e-5, atol=1e-5)


def test_the_loss_is_a_pseudo_huber_distance_that_trains_one_side_only() -> None:
    ours = made(huber=0.5)
    noisy, solved = normals(3, 4, 2, 2), normals(3, 4, 2, 2, seed=1)
    out, target = normals(3, 4, 2, 2, seed=2), normals(3, 4, 2, 2, seed=3)
    out.requires_grad_(True)
    target.requires_grad_(True)
    times = torch.tensor([19, 499, 999])
    loss = ours.loss(out, noisy, times, target, solved, ours.earlier(times))
    apart = ours.end(out, noisy, times) - ours.end(target, solved, ours.earlier(times))
    expected = ((apart**2 + 0.25) ** 0.5 - 0.5).mean((1, 2, 3))
    torch.testing.assert_close(loss, expected)
    loss.sum().backward()
    assert out.grad is not None
    assert target.grad is None


def test_draws_lie_on_the_grid_and_are_keyed_by_the_sample() -> None:
    ours, latents = made(num_solver_steps=10), normals(400, 4, 2, 2)
    keys = torch.stack([torch.arange(400) // 8, torch.arange(400) % 8], dim=1)
    noisy, times, earlier = ours.draw(latents, keys)
    assert set(times.tolist()) == set(ours.grid.tolist()) == {99 + 100 * i for i in range(10)}
    assert torch.equal(earlier, (times - 100).clamp(min=0))
    part = ours.draw(latents[37:40], keys[37:40])
    assert all(torch.equal(a[37:40], b) for a, b in zip((noisy, times, earlier), part, strict=True))
    signal = torch.tensor(ours.schedule.signal)[times].view(-1, 1, 1, 1)
    sigma = torch.tensor(ours.schedule.sigma)[times].view(-1, 1, 1, 1)
    noise = (noisy - signal * latents) / sigma
    assert abs(float(noise.mean())) < 0.05
    assert abs(float(noise.std()) - 1) < 0.05


def test_a_student_learns_where_its_teachers_trajectories_end() -> None:
    """Data N(0, s^2): the exact teacher is linear, and so is the end of a trajectory.

    The student, one factor a timestep, starts as the teacher. Its target is itself, so that what it
    learns has to spread from timestep to timestep; the oracle walks the teacher's steps one by one.
    """
    ours, deviation = made("sample", num_solver_steps=10, guidance=1.0, huber=1e-2), 0.7
    signal, sigma = (torch.tensor(x).double() for x in (ours.schedule.signal, ours.schedule.sigma))
    teacher = signal * deviation**2 / (signal**2 * deviation**2 + sigma**2)
    grid = torch.tensor(ours.grid)

    def walked(start: int) -> float:
        z, t = torch.ones(1, 1).double(), torch.tensor([start])
        while int(t) > 0:
            out = teacher[t].view(-1, 1) * z
            z, t = ours.solve(z, t, ours.earlier(t), out, out), ours.earlier(t)
        return float(z)

    expected = torch.tensor([walked(int(t)) for t in grid])
    factors = teacher.clone().float().requires_grad_(True)
    z = normals(64, 1)

    def ends() -> Tensor:
        ones = torch.ones(len(grid), 1)
        return ours.end(factors[grid].view(-1, 1), ones, grid).detach().flatten()

    before = (ends() - expected).abs().max()
    optimizer = torch.optim.Adam([factors], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    times = grid.repeat_interleave(len(z))
    for _ in range(500):
        latents = deviation * z.repeat(len(grid), 1)
        noise = normals(len(latents), 1, seed=int(schedule.last_epoch))
        noisy = ours.schedule.add_noise(latents, noise, times)
        out = teacher[times].view(-1, 1).float() * noisy
        solved = ours.solve(noisy, times, ours.earlier(times), out, out)
        loss = ours.loss(
            factors[times].view(-1, 1) * noisy, noisy, times,
            factors[ours.earlier(times)].view(-1, 1) * solved, solved, ours.earlier(times),
        )  # fmt: skip
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        schedule.step()
    assert before > 0.3
    assert (ends() - expected).abs().max() < 0.03


@pytest.mark.parametrize("options", [{"num_solver_steps": 0}, {"num_solver_steps": 1001}])
def test_a_grid_that_does_not_fit_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="for a schedule of 1000 steps"):
        made(**options)
    with pytest.raises(SpecError, match=r"huber=0; expected a positive number"):
        made(huber=0)


def test_a_flow_is_refused() -> None:
    flow = NoiseSchedule.from_scheduler(FlowMatchEulerDiscreteScheduler())
    with pytest.raises(UnsupportedError, match="use a teacher of the DDPM family"):
        Consistency(schedule=flow, seed=0)

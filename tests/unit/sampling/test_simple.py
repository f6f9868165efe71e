"""One-process sampling against the plain loop of diffusers' own pipelines."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Backbone, Layer
from lightning_dpipe.objective.schedule import NoiseSchedule
from lightning_dpipe.objective.selfcond import self_conditioning
from lightning_dpipe.sampling.simple import Guidance, SampleRequest, backbone_denoiser, sample

SCHEDULERS = [
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
]


class Net(nn.Module):
    """A denoiser that depends on all it reads, and on each sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        shift = (t / 1000)[:, None, None, None] + context[:, :, None, None]
        return torch.tanh(self.conv(x) + shift)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def backbone(net: Net) -> Backbone:
    layer = Layer(name="net", module=net, reads=("noisy", "timestep", "context"), writes=("out",))
    return Backbone(name="unet", layers=(layer,))


@pytest.mark.parametrize("scheduler_class", SCHEDULERS)
@torch.no_grad()
def test_guided_sampling_equals_the_plain_loop(scheduler_class: type, net: Net) -> None:
    noise, context, empty = torch.randn(3, 2, 4, 4), torch.randn(3, 2), torch.zeros(3, 2)
    scheduler = scheduler_class()
    scheduler.set_timesteps(5)
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        times = torch.full((3,), t.item())
        with_text, without = net(scaled, times, context), net(scaled, times, empty)
        x = scheduler.step(without + 2.5 * (with_text - without), t, x).prev_sample
    drawn = sample(
        backbone_denoiser(backbone(net)),
        scheduler_class(),
        SampleRequest(
            noise=noise,
            num_steps=5,
            conditions={"context": context},
            guidance=Guidance(scale=2.5, unconditional={"context": empty}),
        ),
    )
    torch.testing.assert_close(drawn, x, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_each_step_reads_the_estimate_of_the_step_before(net: Net) -> None:
    seen: list[Tensor] = []

    class Reads(nn.Module):
        def forward(self, x: Tensor, t: Tensor, estimate: Tensor) -> Tensor:
            seen.append(estimate)
            return torch.tanh(x + 0.5 * estimate)

    layer = Layer(
        name="net", module=Reads(), reads=("noisy", "timestep", "estimate"), writes=("out",)
    )
    scheduler = DDIMScheduler(clip_sample=True)
    feedback = self_conditioning(NoiseSchedule.from_scheduler(scheduler), shape=(2, 4, 4))
    noise = torch.randn(3, 2, 4, 4)
    drawn = sample(
        backbone_denoiser(Backbone(name="b", layers=(layer,))),
        scheduler,
        SampleRequest(noise=noise, num_steps=4, self_conditioning=feedback),
    )
    reference = DDIMScheduler(clip_sample=True)
    reference.set_timesteps(4)
    x, estimate = noise, torch.zeros_like(noise)
    for i, t in enumerate(reference.timesteps):
        torch.testing.assert_close(seen[i], estimate, rtol=1e-4, atol=1e-4)
        stepped = reference.step(torch.tanh(x + 0.5 * estimate), t, x)
        x, estimate = stepped.prev_sample, stepped.pred_original_sample
    torch.testing.assert_close(drawn, x, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_learned_variance_half_is_not_stepped(net: Net) -> None:
    noise, context = torch.randn(3, 2, 4, 4), torch.randn(3, 2)

    def doubled(tensors: dict[str, Tensor]) -> Tensor:
        out = net(tensors["noisy"], tensors["timestep"], tensors["context"])
        return torch.cat([out, torch.full_like(out, 9.0)], dim=1)

    request = SampleRequest(noise=noise, num_steps=3, conditions={"context": context})
    drawn = sample(doubled, DDIMScheduler(), request)
    assert torch.equal(drawn, sample(backbone_denoiser(backbone(net)), DDIMScheduler(), request))


def test_scale_one_runs_the_model_once_a_step(net: Net) -> None:
    sizes: list[int] = []

    def counting(tensors: dict[str, Tensor]) -> Tensor:
        sizes.append(len(tensors["noisy"]))
        return torch.zeros_like(tensors["noisy"])

    context = torch.zeros(3, 2)
    for scale in (1.0, 2.0):
        guidance = Guidance(scale=scale, unconditional={"context": context})
        request = SampleRequest(
            noise=torch.randn(3, 2, 4, 4),
            num_steps=2,
            conditions={"context": context},
            guidance=guidance,
        )
        sample(counting, DDIMScheduler(), request)
    assert sizes == [3, 3, 6, 6]


def test_missing_names_and_wrong_shapes_are_refused(net: Net) -> None:
    noise, context = torch.randn(3, 2, 4, 4), torch.randn(3, 2)
    denoise = backbone_denoiser(backbone(net))
    with pytest.raises(SpecError, match=r"unet.net reads context"):
        sample(denoise, DDIMScheduler(), SampleRequest(noise=noise, num_steps=2))
    for unconditional in ({"context": context[:1]}, {"text": context}):
        request = SampleRequest(
            noise=noise,
            num_steps=2,
            conditions={"context": context},
            guidance=Guidance(scale=2.0, unconditional=unconditional),
        )
        with pytest.raises(SpecError, match="one unconditional row per sample"):
            sample(denoise, DDIMScheduler(), request)

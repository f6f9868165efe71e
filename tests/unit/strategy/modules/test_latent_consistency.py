"""The distillation module: who trains, what runs ahead, what is drawn."""

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.data.circles import CirclesDataModule
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.strategy.local import sample_losses
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.latent_consistency import LatentConsistency
from saved import TEXT, UNET, VAE

SIZE, TOKENS = 32, 7


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "unet": UNET, "vae": VAE, "text": TEXT, "image_size": SIZE, "num_tokens": TOKENS,
        "scheduler": DDPMScheduler(prediction_type="v_prediction", clip_sample=False), "seed": 3,
        **changes,
    }  # fmt: skip
    module: Any = LatentConsistency(**options)
    module.configure_model()
    return module


def keyed_batch(count: int = 3) -> dict[str, Tensor]:
    data = CirclesDataModule(batch_size=count, size=SIZE, num_samples=8, num_tokens=TOKENS)
    fields: dict[str, Tensor] = next(iter(data.val_dataloader()))
    return {**fields, DRAW_KEY: torch.tensor([[0, i] for i in range(count)])}


def encoded(module: Any, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    values = dict(fields)
    with torch.no_grad():
        for component in module.spec.frozen:
            for layer in component.layers:
                made = layer.module(*[values[name] for name in layer.reads])
                made = made if isinstance(made, tuple) else (made,)
                values.update(zip(layer.writes, made, strict=True))
    return values


def test_the_student_trains_from_where_the_teacher_is() -> None:
    module, fields = build(), keyed_batch()
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert {n.split(".")[0] for n in trained} == {"unet"}
    for a, b in zip(module.unet.parameters(), module.teacher.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is not b
    (loss,) = sample_losses(module.spec, fields, self_conditioned=False).values()
    assert loss.shape == (3,)
    loss.mean().backward()
    assert all(p.grad is not None for p in module.unet.parameters())
    assert all(p.grad is None for p in module.teacher.parameters())
    module.train()
    assert not module.teacher.conv_in.training


def test_the_teachers_step_is_frozen_work_by_the_librarys_own_forward() -> None:
    """It does not see the student: other weights there change none of it."""
    module, fields = build(guidance=3.0), keyed_batch()
    values = encoded(module, fields)
    times = values["timestep"]
    with torch.no_grad():
        empty = torch.tensor(module.empty["input_ids"]).expand_as(fields["input_ids"])
        outs = [
            module.teacher(
                values["noisy"], times, module.text(input_ids=ids).last_hidden_state
            ).sample
            for ids in (fields["input_ids"], empty)
        ]
        expected = module.consistency.solve(values["noisy"], times, values["earlier"], *outs)
        for p in module.unet.parameters():
            p.add_(1.0)
    assert torch.equal(values["solved"], expected)
    assert torch.equal(encoded(module, fields)["solved"], values["solved"])


def test_the_loss_is_that_of_two_whole_students() -> None:
    module, fields = build(), keyed_batch()
    values = encoded(module, fields)
    with torch.no_grad():
        context = values["context"]
        outs = [
            module.unet(values[x], values[t], context).sample
            for x, t in (("noisy", "timestep"), ("solved", "earlier"))
        ]
    expected = module.consistency.loss(
        outs[0], values["noisy"], values["timestep"],
        outs[1], values["solved"], values["earlier"],
    )  # fmt: skip
    (loss,) = sample_losses(module.spec, fields, self_conditioned=False).values()
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_samples_are_drawn_in_jumps_as_the_lcm_scheduler_makes_them(num_steps: int) -> None:
    module, fields = build(), keyed_batch(2)
    drawn = module.draw_samples(fields, num_steps=num_steps, guidance=9.0)
    assert drawn.shape == (2, 3, SIZE, SIZE)
    theirs = module.sampler()
    theirs.set_timesteps(num_steps, original_inference_steps=50)
    assert torch.equal(theirs.alphas_cumprod, module.scheduler.alphas_cumprod)
    noises = [
        starting_noise(3, 2, module.latent_shape, module.device, f"sample_{i}")
        for i in range(num_steps)
    ]
    x, context = noises[0], module.text(fields["input_ids"]).last_hidden_state
    with torch.no_grad():
        for i, t in enumerate(theirs.timesteps):
            out = module.unet(x, t, context).sample
            x0 = theirs.step(out, t, x).denoised
            if i + 1 < num_steps:
                x = theirs.add_noise(x0, noises[i + 1], theirs.timesteps[i + 1].view(1))
        # The schedule's first point is almost, not quite, pure noise: ours mixes in its signal.
        torch.testing.assert_close(drawn, module.decode(x0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options", [{"self_conditioning": 0.5}, {"min_snr_gamma": 5.0}, {"caption_dropout": 0.1}]
)
def test_what_has_no_place_in_a_distillation_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UnsupportedError, match=f"{name}=.* for a consistency distillation"):
        build(**options)

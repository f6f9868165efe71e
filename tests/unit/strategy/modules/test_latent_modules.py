"""Stable Diffusion and ControlNet modules: what trains, what is encoded, what is drawn."""

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.data.circles import CirclesDataModule
from lightning_dpipe.models.buckets import trace_buckets
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.strategy.local import sample_losses
from lightning_dpipe.strategy.modules.controlnet import ControlNet
from lightning_dpipe.strategy.modules.latent import LatentModule
from lightning_dpipe.strategy.modules.stable_diffusion import StableDiffusion
from saved import TEXT, UNET, VAE

SIZE, TOKENS = 32, 7
OPTIONS: dict[str, Any] = {
    "unet": UNET, "vae": VAE, "text": TEXT, "image_size": SIZE, "num_tokens": TOKENS, "seed": 3,
}  # fmt: skip


def build(kind: type[LatentModule], **changes: Any) -> Any:
    torch.manual_seed(0)
    scheduler = DDPMScheduler(prediction_type="v_prediction")
    module: Any = kind(**{**OPTIONS, "scheduler": scheduler, **changes})
    module.configure_model()
    return module


def batch(count: int) -> dict[str, Tensor]:
    data = CirclesDataModule(batch_size=count, size=SIZE, num_samples=8, num_tokens=TOKENS)
    fields: dict[str, Tensor] = next(iter(data.val_dataloader()))
    return fields


def keyed(fields: dict[str, Tensor], step: int = 0) -> dict[str, Tensor]:
    count = len(fields["image"])
    return {**fields, DRAW_KEY: torch.tensor([[step, i] for i in range(count)])}


@pytest.mark.parametrize(
    ("kind", "trained"), [(StableDiffusion, {"unet"}), (ControlNet, {"controlnet"})]
)
def test_only_the_backbones_own_weights_train(kind: Any, trained: set[str]) -> None:
    module = build(kind)
    assert {n.split(".")[0] for n, p in module.named_parameters() if p.requires_grad} == trained
    module.train()
    assert not any(m.training for m in (module.text.encoder.layers[0], module.vae.encoder.conv_in))


def test_the_encoders_are_the_librarys() -> None:
    module, fields = build(StableDiffusion, caption_dropout=0.0), keyed(batch(3))
    values = dict(fields)
    with torch.no_grad():
        for component in module.spec.frozen:
            for layer in component.layers:
                made = layer.module(*[values[name] for name in layer.reads])
                made = made if isinstance(made, tuple) else (made,)
                values.update(zip(layer.writes, made, strict=True))
        context = module.text(input_ids=fields["input_ids"]).last_hidden_state
        posterior = module.vae.encode(fields["image"]).latent_dist
    assert torch.equal(values["context"], context)
    latents = values["latents"] / module.vae.config.scaling_factor
    assert latents.shape == (3, *module.latent_shape) == (3, 4, 4, 4)
    assert ((latents - posterior.mean).abs() <= 6 * posterior.std).all()


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_captions_become_the_empty_one(probability: float) -> None:
    module, fields = build(StableDiffusion, caption_dropout=probability), keyed(batch(3))
    (layer,) = module.spec.frozen[0].layers
    ids = layer.module(fields["input_ids"], fields[DRAW_KEY])
    empty = torch.tensor(module.empty["input_ids"]).expand_as(ids)
    assert torch.equal(ids, empty if probability else fields["input_ids"])


@pytest.mark.parametrize("kind", [StableDiffusion, ControlNet])
def test_a_step_trains_and_draws(kind: Any) -> None:
    module, fields = build(kind), batch(2)
    (loss,) = sample_losses(module.spec, keyed(fields), self_conditioned=False).values()
    loss.mean().backward()
    got = {n.split(".")[0] for n, p in module.named_parameters() if p.grad is not None}
    assert len(got) == 1
    images = module.draw_samples(fields, num_steps=2, guidance=2.0)
    assert images.shape == (2, 3, SIZE, SIZE)
    assert images.abs().max() <= 1


def test_the_hint_changes_what_a_trained_controlnet_draws() -> None:
    module, fields = build(ControlNet), batch(2)
    other = {**fields, "hint": 1 - fields["hint"]}
    first, second = (module.draw_samples(f, num_steps=2, guidance=1.0) for f in (fields, other))
    assert torch.equal(first, second)  # its zero convolutions are zero
    with torch.no_grad():
        module.controlnet.controlnet_cond_embedding.conv_out.weight.add_(0.5)
        for conv in module.controlnet.controlnet_down_blocks:
            conv.weight.add_(0.5)
    second = module.draw_samples(other, num_steps=2, guidance=1.0)
    assert not torch.equal(module.draw_samples(fields, num_steps=2, guidance=1.0), second)


def test_self_conditioning_widens_the_unet_only() -> None:
    module = build(StableDiffusion, self_conditioning=0.5)
    assert module.unet.conv_in.in_channels == 8
    assert module.spec.self_conditioning.shape == module.latent_shape
    with pytest.raises(UnsupportedError, match=r"self_conditioning=0.5 for a ControlNet"):
        build(ControlNet, self_conditioning=0.5)


def test_an_image_that_is_no_multiple_of_the_latents_is_refused() -> None:
    with pytest.raises(SpecError, match=r"image_size=36 .* multiple of the VAE's 8; use 32 or 40"):
        build(StableDiffusion, image_size=36)
    with pytest.raises(SpecError, match="no scheduler is given"):
        build(StableDiffusion, scheduler=None)


@pytest.mark.parametrize("kind", [StableDiffusion, ControlNet])
def test_buckets_are_classes_of_the_same_model(kind: type[LatentModule]) -> None:
    buckets = {"wide": [16, 48], "tall": [48, 16]}
    options = {"self_conditioning": 1.0} if kind is StableDiffusion else {}
    module = build(kind, buckets=buckets, **options)
    assert list(trace_buckets(module.spec)) == ["base", "wide", "tall"]
    fields = batch(2)
    for name, (height, width) in {"base": (SIZE, SIZE), **buckets}.items():
        images = {
            n: torch.nn.functional.interpolate(t, (height, width)) if t.dim() == 4 else t
            for n, t in fields.items()
        }
        assert module.spec.bucket_of(images) == name
        losses = sample_losses(module.spec, keyed(images), self_conditioned=bool(options))
        assert all(loss.shape == (2,) and bool(loss.isfinite().all()) for loss in losses.values())
    with pytest.raises(
        SpecError, match=r"buckets\.odd=20 is not a multiple of the VAE's 8; use 16"
    ):
        build(kind, buckets={"odd": [16, 20]})


@pytest.mark.parametrize("kind", [StableDiffusion, ControlNet])
def test_stored_moments_train_as_their_images_do_and_are_drawn_anew_each_step(kind: Any) -> None:
    """Same losses as with images, and another latent in every step: not one frozen sample."""
    module, stored = build(kind), build(kind, precomputed=True)
    fields = keyed(batch(3))
    values = dict(fields)
    with torch.no_grad():
        for layer in next(c for c in module.spec.frozen if c.name == "vae").layers[:-1]:
            made = layer.module(*[values[name] for name in layer.reads])
            made = made if isinstance(made, tuple) else (made,)
            values.update(zip(layer.writes, made, strict=True))
    latents = {name: t for name, t in fields.items() if name != "image"}
    latents["moments"] = values["moments"]
    assert {"moments", "input_ids"} <= set(stored.spec.inputs)
    assert "image" not in stored.spec.inputs
    losses = sample_losses(module.spec, fields, self_conditioned=False)
    others = sample_losses(stored.spec, latents, self_conditioned=False)
    assert list(losses) == list(others)
    assert all(torch.equal(losses[name], others[name]) for name in losses)
    (draw,) = next(c for c in stored.spec.frozen if c.name == "vae").layers
    steps = [draw.module(values["moments"], keyed(fields, step)[DRAW_KEY]) for step in (0, 0, 1)]
    assert torch.equal(steps[0], steps[1])
    assert not torch.equal(steps[0], steps[2])
    real = stored.real_images(latents)
    assert real.shape == fields["image"].shape

"""DiT, PixArt, SD3 and Flux modules: what they draw is what diffusers' pipelines draw."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiTPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.data.circles import _numbered
from lightning_dpipe.models.flux import pack
from lightning_dpipe.models.verify import run_layers
from lightning_dpipe.strategy.modules import transformers
from lightning_dpipe.strategy.modules.drawing import starting_noise
from recipe import batch_of, built

CAPTIONS = ["red circle on blue", "black circle on green"]
STEPS, SIZE, TOKENS = 3, 64, 8


class Words:
    """A tokenizer that numbers the words of the drawn circles; "" as each encoder has it."""

    model_max_length = TOKENS
    added_tokens_encoder: ClassVar[dict[str, int]] = {}

    def __init__(self, empty: tuple[int, ...]) -> None:
        self.empty = empty

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def __call__(self, texts: Any, **_: Any) -> Any:
        texts = [texts] if isinstance(texts, str) else texts
        ids = torch.tensor([_numbered(t, TOKENS) if t else self.empty for t in texts])
        return SimpleNamespace(input_ids=ids, attention_mask=(ids != 0).long())


def fields_of(module: Any) -> dict[str, Tensor]:
    ids = torch.tensor([_numbered(caption, TOKENS) for caption in CAPTIONS])
    found = {name: ids for name in module.empty if name.startswith("input_ids")}
    return {**found, "attention_mask": (ids != 0).long()}


def noise_of(module: Any) -> Tensor:
    return starting_noise(module.seed, 2, module.latent_shape, torch.device("cpu"))


def same_images(module: Any, ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == (2, 3, SIZE, SIZE)
    torch.testing.assert_close((ours + 1) / 2, theirs, rtol=0, atol=1e-5)
    assert ours.std() > 1e-3
    assert not torch.allclose(ours[0], ours[1], atol=1e-3)


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tokenizers(module: Any) -> dict[str, Words]:
    names = [name for name in module.empty if name.startswith("input_ids")]
    return {n.replace("input_ids", "tokenizer"): Words(module.empty[n]) for n in names}


def encoders(module: Any) -> dict[str, Any]:
    return {part.name.replace("text", "text_encoder"): getattr(module, part.name)
            for part in module.texts}  # fmt: skip


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@torch.no_grad()
def test_a_dit_draws_what_its_pipeline_draws(
    guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = built("dit_tiny", "model.transformer.num_embeds_ada_norm=1000", jitter=0.05).eval()
    ours = module.draw_samples(
        {"label": torch.tensor([3, 999])}, num_steps=STEPS, guidance=guidance
    )
    noise = noise_of(module)
    monkeypatch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda **_: noise)
    scheduler = DDIMScheduler.from_config(module.scheduler.config)
    pipeline = quiet(DiTPipeline(module.transformer, module.vae, scheduler))
    theirs = pipeline(
        [3, 999], guidance_scale=guidance, num_inference_steps=STEPS, output_type="pt"
    )
    same_images(module, ours, theirs.images)


@torch.no_grad()
def test_pixart_draws_what_its_pipeline_draws() -> None:
    module = built("pixart_tiny", jitter=0.05).eval()
    ours = module.draw_samples(fields_of(module), num_steps=STEPS, guidance=3.0)
    pipeline = quiet(
        PixArtAlphaPipeline(
            **tokenizers(module),
            **encoders(module),
            vae=module.vae,
            transformer=module.transformer,
            scheduler=DDIMScheduler.from_config(module.scheduler.config),
        )
    )
    theirs = pipeline(
        CAPTIONS, guidance_scale=3.0, num_inference_steps=STEPS, latents=noise_of(module),
        height=SIZE, width=SIZE, clean_caption=False, use_resolution_binning=False,
        max_sequence_length=TOKENS, output_type="pt",
    )  # fmt: skip
    same_images(module, ours, theirs.images)


@torch.no_grad()
def test_pixart_at_1024_px_is_told_the_size() -> None:
    """The library asks for it by the latent's side, 128; sides here stay small all the same."""
    module = built("pixart_tiny", "model.transformer.sample_size=128", jitter=0.05).eval()
    assert module.transformer.use_additional_conditions
    fields = batch_of("pixart_tiny", 2)
    values = dict(fields)
    for component in module.spec.frozen:
        values = run_layers(component.layers, values)
    assert values["resolution"].tolist() == [[64.0, 64.0]] * 2
    assert values["aspect_ratio"].tolist() == [[1.0]] * 2
    ours = module.draw_samples(fields_of(module), num_steps=STEPS, guidance=1.0)
    assert ours.shape == (2, 3, SIZE, SIZE)


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_sd3_draws_what_its_pipeline_draws(dynamic: bool) -> None:
    module = built(
        "sd3_tiny", f"model.scheduler.use_dynamic_shifting={dynamic}", jitter=0.05
    ).eval()
    ours = module.draw_samples(fields_of(module), num_steps=STEPS, guidance=3.0)
    pipeline = quiet(
        StableDiffusion3Pipeline(
            **tokenizers(module),
            **encoders(module),
            vae=module.vae,
            transformer=module.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler.from_config(module.scheduler.config),
        )
    )
    theirs = pipeline(
        CAPTIONS, guidance_scale=3.0, num_inference_steps=STEPS, latents=noise_of(module),
        height=SIZE, width=SIZE, max_sequence_length=TOKENS, output_type="pt",
    )  # fmt: skip
    same_images(module, ours, theirs.images)


@pytest.mark.parametrize("distilled", [False, True])
@torch.no_grad()
def test_flux_draws_what_its_pipeline_draws(distilled: bool) -> None:
    module = built(
        "flux_tiny", f"model.transformer.guidance_embeds={distilled}", jitter=0.05
    ).eval()
    ours = module.draw_samples(fields_of(module), num_steps=STEPS, guidance=2.0)
    assert "guidance" not in module.spec.backbones[0].layers[0].reads or distilled
    pipeline = quiet(
        FluxPipeline(
            **tokenizers(module),
            **encoders(module),
            vae=module.vae,
            transformer=module.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler.from_config(module.scheduler.config),
        )
    )
    theirs = pipeline(
        CAPTIONS, guidance_scale=2.0, num_inference_steps=STEPS, latents=pack(noise_of(module)),
        height=SIZE, width=SIZE, max_sequence_length=TOKENS, output_type="pt",
    )  # fmt: skip
    same_images(module, ours, theirs.images)
    if distilled:
        other = module.draw_samples(fields_of(module), num_steps=STEPS, guidance=9.0)
        assert not torch.equal(other, ours)


@pytest.mark.parametrize(
    ("recipe", "trained"),
    [(f"{name}_tiny", {"transformer"}) for name in ("dit", "pixart", "sd3", "flux")],
)
def test_only_the_transformer_trains(recipe: str, trained: set[str]) -> None:
    module = built(recipe)
    assert {n.split(".")[0] for n, p in module.named_parameters() if p.requires_grad} == trained
    module.train()
    frozen = [m for c in module.spec.frozen for layer in c.layers for m in layer.modules()]
    assert frozen
    assert not any(m.training for m in frozen)


@pytest.mark.parametrize("recipe", ["pixart_tiny", "sd3_tiny", "flux_tiny"])
def test_a_sample_without_its_caption_is_without_it_for_every_encoder(recipe: str) -> None:
    module, count = built(recipe, "model.caption_dropout=0.5"), 16
    values = {**batch_of(recipe, count)}
    for component in module.spec.frozen:
        if component.name.startswith("caption") and component.name != "captions":
            values = run_layers(component.layers, values)
    dropped = [
        (values[f"caption_{name}"] == torch.tensor(module.empty[name])).all(1).tolist()
        for name in module.empty
        if name.startswith("input_ids")
    ]
    assert 0 < sum(dropped[0]) < count
    assert all(row == dropped[0] for row in dropped)


@pytest.mark.parametrize("recipe", ["dit_tiny", "pixart_tiny", "sd3_tiny"])
def test_an_estimate_is_read_through_channels_that_start_at_zero(recipe: str) -> None:
    plain = built(recipe)
    module = built(recipe, "model.self_conditioning=0.5")
    assert module.transformer.pos_embed.proj.in_channels == 8
    assert torch.equal(
        module.transformer.pos_embed.proj.weight[:, :4], plain.transformer.pos_embed.proj.weight
    )
    assert module.spec.self_conditioning.shape == module.latent_shape


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="FluxTransformer2DModel"):
        built("flux_tiny", "model.self_conditioning=0.5")
    with pytest.raises(SpecError, match=r"1 lengths, the model reads .* at least 2 tokenizers"):
        built("flux_tiny", "model.num_tokens=[8]")
    with pytest.raises(SpecError, match="text_dtype='int8' is no floating dtype"):
        transformers.Flux(text_dtype="int8")

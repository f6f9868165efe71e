"""The shipped modules: their frozen work, their spec, the samples they draw."""

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lightning_dpipe.data.shapes import WORDS, ShapesDataModule
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.strategy.local import sample_losses
from lightning_dpipe.strategy.modules.captions import encode_captions
from lightning_dpipe.strategy.modules.class_conditional import ClassConditional
from lightning_dpipe.strategy.modules.drawing import starting_noise
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig
from lightning_dpipe.strategy.modules.text_to_image import TextToImage


def text_to_image(**changes: Any) -> TextToImage:
    torch.manual_seed(0)
    module = TextToImage(
        unet={
            "sample_size": 8,
            "in_channels": 12,
            "out_channels": 12,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            "norm_num_groups": 4,
        },
        scheduler=DDPMScheduler(prediction_type="v_prediction"),
        optimizer=AdamWConfig(),
        image_size=16,
        num_tokens=4,
        text={
            "vocab_size": len(WORDS),
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 8,
        },
        **{"seed": 3, **changes},
    )
    module.configure_model()
    return module


def class_conditional(**changes: Any) -> ClassConditional:
    torch.manual_seed(0)
    module = ClassConditional(
        dit={
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 1,
            "out_channels": 1,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 1,
            "num_embeds_ada_norm": 10,
        },
        scheduler=DDPMScheduler(prediction_type="sample"),
        optimizer=AdamWConfig(),
        **{"seed": 3, **changes},
    )
    module.configure_model()
    return module


def captions(count: int) -> dict[str, Tensor]:
    dataset = ShapesDataModule(batch_size=count).val_dataloader()
    batch: dict[str, Tensor] = next(iter(dataset))
    return batch


def test_the_text_encoder_is_frozen_and_nothing_else_is() -> None:
    module = text_to_image()
    frozen = {n.split(".")[0] for n, p in module.named_parameters() if not p.requires_grad}
    trained = {n.split(".")[0] for n, p in module.named_parameters() if p.requires_grad}
    assert (frozen, trained) == ({"text"}, {"unet"})
    assert not module.text.training


def test_configuring_twice_keeps_the_weights() -> None:
    for module in (text_to_image(), class_conditional()):
        before = [id(p) for p in module.parameters()]
        module.configure_model()
        assert [id(p) for p in module.parameters()] == before


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_captions_are_dropped_in_training_and_never_when_drawing(probability: float) -> None:
    module = text_to_image(caption_dropout=probability, context_scale=2.0)
    fields = captions(3)
    with torch.no_grad():
        expected = module.text(
            input_ids=fields["input_ids"], attention_mask=fields["attention_mask"]
        ).last_hidden_state
    assert torch.allclose(
        encode_captions(module.spec.frozen[:2], fields, module.device), 2.0 * expected, atol=1e-6
    )
    named = {**fields, DRAW_KEY: torch.tensor([[0, 0], [0, 1], [0, 2]])}
    layers = (*module.spec.frozen[0].layers, *module.spec.frozen[1].layers)
    for layer in layers:
        out = layer.module(*(named[r] for r in layer.reads))
        named.update(zip(layer.writes, out if isinstance(out, tuple) else (out,), strict=True))
    assert bool((named["context"] == 0).all()) is (probability == 1.0)


def test_a_drawn_image_does_not_depend_on_the_others_in_its_batch() -> None:
    module = text_to_image()
    fields = captions(3)
    with torch.no_grad():
        all_three = module.draw_samples(fields, num_steps=3, guidance=2.0)
        first = module.draw_samples(
            {k: v[:1] for k, v in fields.items()}, num_steps=3, guidance=2.0
        )
    assert all_three.shape == (3, 3, 16, 16)
    assert torch.allclose(all_three[:1], first, atol=1e-4)
    assert not torch.allclose(all_three[1], all_three[0], atol=1e-2)


def test_guidance_one_ignores_the_unconditional_model() -> None:
    module = class_conditional()
    labels = {"label": torch.tensor([1, 2])}
    with torch.no_grad():
        before = module.draw_samples(labels, num_steps=3, guidance=1.0)
        embedding = module.dit.transformer_blocks[0].norm1.emb.class_embedder.embedding_table
        embedding.weight[module.null_class] += 10.0
        assert torch.equal(module.draw_samples(labels, num_steps=3, guidance=1.0), before)
        assert not torch.equal(module.draw_samples(labels, num_steps=3, guidance=2.0), before)


def test_the_estimate_is_read_once_its_new_channels_are_trained() -> None:
    module = class_conditional(label_dropout=0.0)
    fields = {
        "image": torch.rand(4, 1, 8, 8) * 2 - 1,
        "label": torch.arange(4),
        DRAW_KEY: torch.stack([torch.zeros(4), torch.arange(4)], dim=1).long(),
    }
    plain, coined = (
        sample_losses(module.spec, fields, self_conditioned=c)["dit"] for c in (False, True)
    )
    assert torch.equal(plain, coined)  # the new channels start at zero
    with torch.no_grad():
        module.dit.pos_embed.proj.weight[:, 1:].fill_(0.5)
    plain, coined = (
        sample_losses(module.spec, fields, self_conditioned=c)["dit"] for c in (False, True)
    )
    assert not torch.equal(plain, coined)


def test_without_self_conditioning_the_model_is_the_librarys() -> None:
    module = class_conditional(self_conditioning=None)
    assert module.spec.self_conditioning is None
    assert module.dit.pos_embed.proj.in_channels == 1


def test_starting_noise_is_the_seeds_and_the_samples() -> None:
    noise = starting_noise(1, 4, (2, 3), torch.device("cpu"))
    assert torch.equal(starting_noise(1, 2, (2, 3), torch.device("cpu")), noise[:2])
    assert not torch.equal(starting_noise(2, 4, (2, 3), torch.device("cpu")), noise)

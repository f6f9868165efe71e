"""Parts from a folder in diffusers' layout, and from configurations."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.encoders import TextKind, TextPart
from lightning_dpipe.models.parts import (
    Source,
    caption_fields,
    diffusers_part,
)
from saved import TEXT, VAE, save_pipeline

CLIP = TextPart(kind=TextKind.CLIP, context="context")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("saved") / "pipeline")


def test_weights_come_from_the_folder(folder: Path) -> None:
    source = Source(path=str(folder))
    vae = diffusers_part(AutoencoderKL, None, source, "vae")
    saved = AutoencoderKL.from_pretrained(folder / "vae")
    assert all(map(torch.equal, vae.parameters(), saved.parameters()))
    text = CLIP.build(None, source)
    assert text.config.num_hidden_layers == 1


def test_without_a_source_a_configuration_gets_random_weights() -> None:
    assert diffusers_part(AutoencoderKL, VAE, None, "vae").config.block_out_channels == (4, 4, 8, 8)
    text = CLIP.build(TEXT, None)
    assert CLIP.empty_caption(text, None, (5,)) == {"input_ids": (1, 2, 0, 0, 0)}


def test_captions_are_padded_and_cut_by_the_pipelines_tokenizer(folder: Path) -> None:
    source = Source(path=str(folder))
    text = CLIP.build(None, source)
    assert CLIP.empty_caption(text, source, (5,)) == {"input_ids": (1, 2, 0, 0, 0)}
    fields = caption_fields(source, ["a b", "a b a b a b"], 5)
    assert fields["input_ids"].tolist() == [[1, 5, 6, 2, 0], [1, 5, 6, 5, 2]]
    assert fields["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"no folder other/ \(it has: scheduler, text_encoder, tokenizer, unet, vae"
    ):
        Source(path=str(folder)).load(AutoencoderKL, "other")
    (tmp_path / "vae").mkdir()
    with pytest.raises(SpecError, match=r"vae of .* cannot be loaded"):
        Source(path=str(tmp_path)).load(AutoencoderKL, "vae")
    with pytest.raises(SpecError, match="nothing says what vae is"):
        diffusers_part(AutoencoderKL, None, None, "vae")

"""Parts from a folder in diffusers' layout, and from configurations."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.parts import (
    Source,
    clip_text_part,
    clip_tokens,
    diffusers_part,
    empty_caption,
)

VAE = {"block_out_channels": (8,), "norm_num_groups": 4}
TEXT = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 8, "projection_dim": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline of tiny parts, with a tokenizer that knows the letters a and b."""
    path = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    AutoencoderKL(**VAE).save_pretrained(path / "vae")
    CLIPTextModel(CLIPTextConfig(**TEXT)).save_pretrained(path / "text_encoder")
    words = ["!", "<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>"]
    tokenizer = path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(words)}))
    (tokenizer / "merges.txt").write_text("#version: 0.2\n")
    settings = {
        "tokenizer_class": "CLIPTokenizer", "bos_token": "<|startoftext|>", "pad_token": "!",
        "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "model_max_length": 8,
    }  # fmt: skip
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_weights_come_from_the_folder(folder: Path) -> None:
    source = Source(path=str(folder))
    vae = diffusers_part(AutoencoderKL, None, source, "vae")
    saved = AutoencoderKL.from_pretrained(folder / "vae")
    assert all(map(torch.equal, vae.parameters(), saved.parameters()))
    text = clip_text_part(None, source)
    assert text.config.num_hidden_layers == 1


def test_without_a_source_a_configuration_gets_random_weights() -> None:
    assert diffusers_part(AutoencoderKL, VAE, None, "vae").config.block_out_channels == (8,)
    text = clip_text_part(TEXT, None)
    assert empty_caption(text, None, 5) == (1, 2, 0, 0, 0)


def test_captions_are_padded_and_cut_by_the_pipelines_tokenizer(folder: Path) -> None:
    source = Source(path=str(folder))
    text = clip_text_part(None, source)
    assert empty_caption(text, source, 5) == (1, 2, 0, 0, 0)
    ids = clip_tokens(source, ["a b", "a b a b a b"], 5)
    assert ids.tolist() == [[1, 5, 6, 2, 0], [1, 5, 6, 5, 2]]


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no folder unet/ \(it has: text_encoder, tokenizer, vae"):
        Source(path=str(folder)).load(AutoencoderKL, "unet")
    (tmp_path / "vae").mkdir()
    with pytest.raises(SpecError, match=r"vae of .* cannot be loaded"):
        Source(path=str(tmp_path)).load(AutoencoderKL, "vae")
    with pytest.raises(SpecError, match="nothing says what vae is"):
        diffusers_part(AutoencoderKL, None, None, "vae")

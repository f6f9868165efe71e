"""A tiny Stable Diffusion pipeline on disk, whose tokenizer knows the letters a and b."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

UNET: dict[str, Any] = {
    "sample_size": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 8, "attention_head_dim": 2, "norm_num_groups": 4,
}  # fmt: skip
VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 8, "projection_dim": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WORDS = ("!", "<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>")


def save_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({w: i for i, w in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {
        "tokenizer_class": "CLIPTokenizer", "bos_token": "<|startoftext|>", "pad_token": "!",
        "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "model_max_length": 8,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_pipeline(folder: Path) -> Path:
    torch.manual_seed(0)
    AutoencoderKL(**VAE).save_pretrained(folder / "vae")
    UNet2DConditionModel(**UNET).save_pretrained(folder / "unet")
    CLIPTextModel(CLIPTextConfig(**TEXT)).save_pretrained(folder / "text_encoder")
    scheduler = DDPMScheduler(prediction_type="v_prediction", clip_sample=False, steps_offset=1)
    scheduler.save_pretrained(folder / "scheduler")
    save_tokenizer(folder / "tokenizer")
    return folder

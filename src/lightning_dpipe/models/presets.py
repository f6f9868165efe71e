"""Published full-size models: their configurations, and modules of them on the meta device.

In:     a configuration. Out: a module without memory for its weights: for counting and planning.
Arguments that are not listed have the library's default. Parameter counts are tested.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

M = TypeVar("M", bound=nn.Module)

SD21_BASE_UNET: Mapping[str, Any] = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),  # the number of heads, in spite of its name
    "use_linear_projection": True,
}
SD21_UNET: Mapping[str, Any] = {**SD21_BASE_UNET, "sample_size": 96, "upcast_attention": True}
SD15_UNET: Mapping[str, Any] = {
    **SD21_BASE_UNET,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "use_linear_projection": False,
}
CONTROLNET_SD15: Mapping[str, Any] = {
    "conditioning_channels": 3,
    "conditioning_embedding_out_channels": (16, 32, 96, 256),
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
CONTROLNET_SD21: Mapping[str, Any] = {
    **CONTROLNET_SD15,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
    "upcast_attention": True,
}
SD_VAE: Mapping[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "sample_size": 768,
    "scaling_factor": 0.18215,
}
SD21_TEXT: Mapping[str, Any] = {  # OpenCLIP-H, cut to 23 layers
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}
SD15_TEXT: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
DIT_XL_2_256: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "patch_size": 2,
    "sample_size": 32,
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
}
PIXART_ALPHA_512: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "sample_size": 64,
    "patch_size": 2,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
}
SD3_M: Mapping[str, Any] = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
SD35_M: Mapping[str, Any] = {
    **SD3_M,
    "qk_norm": "rms_norm",
    "dual_attention_layers": tuple(range(13)),
    "pos_embed_max_size": 384,
}
SD35_L: Mapping[str, Any] = {
    **SD3_M,
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "qk_norm": "rms_norm",
}
FLUX_DEV: Mapping[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}


def on_meta(kind: type[M], config: Mapping[str, Any]) -> M:
    """A diffusers model of class `kind` without memory for its weights."""
    with torch.device("meta"):
        return kind(**config)


def text_encoder_on_meta(config: Mapping[str, Any]) -> CLIPTextModel:
    """A CLIP text encoder without memory for its weights; frozen, in eval mode."""
    with torch.device("meta"):
        model = CLIPTextModel._from_config(CLIPTextConfig(**config), attn_implementation="sdpa")
    encoder: CLIPTextModel = model.eval().requires_grad_(False)
    return encoder

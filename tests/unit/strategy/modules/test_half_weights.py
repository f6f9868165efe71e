"""Files in half precision are a way of storing weights, not of training them."""

from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from lightning_dpipe.strategy.modules.controlnet import ControlNet
from lightning_dpipe.strategy.modules.stable_diffusion import StableDiffusion
from saved import save_pipeline


def test_what_was_stored_in_half_trains_in_full_precision(tmp_path: Path) -> None:
    folder = save_pipeline(tmp_path / "pipeline")
    stored = UNet2DConditionModel.from_pretrained(folder / "unet").half()
    stored.save_pretrained(folder / "unet")
    for kind in (StableDiffusion, ControlNet):
        module = kind(pretrained=str(folder), image_size=32, num_tokens=7, seed=0)
        module.configure_model()
        trained = [p for p in module.parameters() if p.requires_grad]
        assert trained
        assert {p.dtype for p in trained} == {torch.float32}

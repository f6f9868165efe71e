"""A checkpoint as a folder: what diffusers loads from it is what was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DiTTransformer2DModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.export import export
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.modules.class_conditional import ClassConditional
from lightning_dpipe.strategy.modules.controlnet import ControlNet
from lightning_dpipe.strategy.modules.optimizer import AdamWConfig
from lightning_dpipe.strategy.modules.stable_diffusion import StableDiffusion
from saved import save_pipeline


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("saved") / "pipeline")


def build(kind: Any, base: Path) -> Any:
    module = kind(pretrained=str(base), image_size=32, num_tokens=8)
    module.configure_model()
    return module


def trained(module: DiffusionModule) -> dict[str, Any]:
    """A checkpoint of the module after one made-up step, with averaged weights."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    own = [name for name, p in module.named_parameters() if p.requires_grad]
    for name in own:
        state[name] += 0.25
    average = {name: state[name] - 0.125 for name in own}
    return {
        "state_dict": state,
        "callbacks": {"ModelCheckpoint": {}, "EMA": {"num_updates": 7, "average": average}},
        "global_step": 7,
    }


def test_diffusers_loads_the_trained_pipeline_and_draws(base: Path, tmp_path: Path) -> None:
    checkpoint = trained(build(StableDiffusion, base))
    done = export(build(StableDiffusion, base), checkpoint, tmp_path / "out")
    assert done.pipeline == "StableDiffusionPipeline"
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "out")
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    averaged = UNet2DConditionModel.from_pretrained(tmp_path / "out" / "unet_ema")
    average = checkpoint["callbacks"]["EMA"]["average"]
    for name, raw in pipeline.unet.named_parameters():
        assert torch.equal(raw, checkpoint["state_dict"][f"unet.{name}"])
        assert torch.equal(averaged.get_parameter(name), average[f"unet.{name}"])
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline("a b", height=32, width=32, num_inference_steps=2, output_type="np").images
    assert drawn.shape == (1, 32, 32, 3)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "7 steps" in card
    assert "unet_ema" in card


def test_a_controlnet_is_exported_with_the_unet_it_belongs_to(base: Path, tmp_path: Path) -> None:
    checkpoint = trained(build(ControlNet, base))
    done = export(build(ControlNet, base), checkpoint, tmp_path / "out")
    assert done.averaged == ("controlnet_ema",)
    pipeline = StableDiffusionControlNetPipeline.from_pretrained(tmp_path / "out")
    weight = pipeline.controlnet.conv_in.weight
    assert torch.equal(weight, checkpoint["state_dict"]["controlnet.conv_in.weight"])
    original = UNet2DConditionModel.from_pretrained(base / "unet")
    assert torch.equal(pipeline.unet.conv_in.weight, original.conv_in.weight)


def test_parts_without_a_pipeline_are_exported_too(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 1, "out_channels": 1,
        "num_layers": 2, "sample_size": 8, "patch_size": 1, "num_embeds_ada_norm": 10,
    }  # fmt: skip
    module = ClassConditional(dit=config, scheduler=DDPMScheduler(), optimizer=AdamWConfig())
    module.configure_model()
    done = export(module, {"state_dict": module.state_dict()}, tmp_path / "out")
    assert (done.parts, done.averaged, done.pipeline) == (("transformer",), (), None)
    loaded = DiTTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
    assert loaded.config.in_channels == 2  # widened for its estimate
    assert all(map(torch.equal, loaded.parameters(), module.dit.parameters()))


def test_what_cannot_be_exported_is_named_and_nothing_is_written(
    base: Path, tmp_path: Path
) -> None:
    module = build(StableDiffusion, base)
    with pytest.raises(DPipeError, match="checkpoint is not of this model"):
        export(module, {"state_dict": {}}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(DPipeError, match="is not empty"):
        export(module, trained(module), tmp_path / "full")
    with pytest.raises(DPipeError, match=r"DiffusionModule has no part with save_pretrained"):
        export(DiffusionModule(), {}, tmp_path / "out")

"""A checkpoint as a folder: what diffusers loads from it is what was trained."""

import subprocess
import sys
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


def run_alone(code: str, *arguments: Path) -> None:
    """In a process that has diffusers but has never imported this package."""
    guard = "import sys\nassert not any('lightning' in name for name in sys.modules)\n"
    subprocess.run([sys.executable, "-c", code + guard, *map(str, arguments)], check=True)


DENOISE = """
import sys, torch
from diffusers import StableDiffusionPipeline
def output(unet):
    t = torch.tensor([3, 700])
    return unet(torch.linspace(-1, 1, 128).view(2, 4, 4, 4), t, torch.ones(2, 8, 8)).sample.detach()
"""


def output_of(unet: Any) -> torch.Tensor:
    names: dict[str, Any] = {}
    exec(DENOISE, names)
    found: torch.Tensor = names["output"](unet.eval())
    return found


def test_a_fresh_process_without_this_package_computes_the_same(base: Path, tmp_path: Path) -> None:
    module = build(StableDiffusion, base)
    checkpoint = trained(module)
    checkpoint["dpipe_run"] = {"recipe": "mine", "num_samples": 12, "commit": "abc"}
    export(build(StableDiffusion, base), checkpoint, tmp_path / "out")
    run_alone(
        DENOISE
        + "pipe = StableDiffusionPipeline.from_pretrained(sys.argv[1])\n"
        + "raw = output(pipe.unet)\n"
        + "averaged = output(type(pipe.unet).from_pretrained(sys.argv[1] + '/unet_ema'))\n"
        + "torch.save((raw, averaged), sys.argv[2])\n",
        tmp_path / "out",
        tmp_path / "saved.pt",
    )
    raw, averaged = torch.load(tmp_path / "saved.pt")
    module.load_state_dict(checkpoint["state_dict"])
    torch.testing.assert_close(raw, output_of(module.unet), atol=1e-6, rtol=0)
    module.load_state_dict(checkpoint["callbacks"]["EMA"]["average"], strict=False)
    torch.testing.assert_close(averaged, output_of(module.unet), atol=1e-6, rtol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Recipe: mine" in card
    assert "Training samples: 12" in card
    assert "Commit of lightning-dpipe: abc" in card


def test_lora_is_exported_with_its_alpha_and_loads_on_the_base_in_a_fresh_process(
    base: Path, tmp_path: Path
) -> None:
    def adapted() -> Any:
        module = StableDiffusion(
            pretrained=str(base), image_size=32, num_tokens=8, lora={"rank": 2, "alpha": 7}
        )
        module.configure_model()
        return module

    plain = build(StableDiffusion, base)
    export(plain, {"state_dict": plain.state_dict()}, tmp_path / "base")
    module = adapted()
    assert {n.split(".")[-3] for n, p in module.named_parameters() if p.requires_grad} == {
        "lora_A", "lora_B",
    }  # fmt: skip
    checkpoint = trained(module)
    done = export(adapted(), checkpoint, tmp_path / "out")
    assert done.lora
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "ema", "pytorch_lora_weights.safetensors",
    ]  # fmt: skip
    run_alone(
        DENOISE
        + "found = []\n"
        + "for folder in (sys.argv[2], sys.argv[2] + '/ema'):\n"
        + "    pipe = StableDiffusionPipeline.from_pretrained(sys.argv[1])\n"
        + "    pipe.load_lora_weights(folder)\n"
        + "    config, = pipe.unet.peft_config.values()\n"
        + "    found.append((output(pipe.unet), config.r, config.lora_alpha))\n"
        + "torch.save(found, sys.argv[3])\n",
        tmp_path / "base",
        tmp_path / "out",
        tmp_path / "saved.pt",
    )
    (raw, *sizes), (averaged, *_) = torch.load(tmp_path / "saved.pt")
    assert sizes == [2, 7]
    untrained = output_of(module.unet)  # B is zero: the base model's own output
    module.load_state_dict(checkpoint["state_dict"])
    torch.testing.assert_close(raw, output_of(module.unet), atol=1e-6, rtol=0)
    assert (raw - untrained).abs().max() > 1e-2
    module.load_state_dict(checkpoint["callbacks"]["EMA"]["average"], strict=False)
    torch.testing.assert_close(averaged, output_of(module.unet), atol=1e-6, rtol=0)


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

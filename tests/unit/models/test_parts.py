"""Parts from a folder in diffusers' layout, and from configurations."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from safetensors.torch import save_file

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.deferred import recording
from lightning_dpipe.models.encoders import TextKind, TextPart
from lightning_dpipe.models.parts import (
    Source,
    caption_fields,
    diffusers_part,
)
from saved import TEXT, UNET, VAE, save_pipeline

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


def original_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tiny U-Net's weights under the names of the original Stable Diffusion files."""
    resnet = {
        "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
    }  # fmt: skip
    blocks = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "down_blocks.0.resnets.0": "input_blocks.1.0",
        "down_blocks.0.attentions.0": "input_blocks.1.1",
        "down_blocks.0.downsamplers.0.conv": "input_blocks.2.0.op",
        "down_blocks.1.resnets.0": "input_blocks.3.0",
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
        "up_blocks.0.resnets.0": "output_blocks.0.0",
        "up_blocks.0.resnets.1": "output_blocks.1.0",
        "up_blocks.0.upsamplers.0.conv": "output_blocks.1.1.conv",
        "up_blocks.1.resnets.0": "output_blocks.2.0",
        "up_blocks.1.attentions.0": "output_blocks.2.1",
        "up_blocks.1.resnets.1": "output_blocks.3.0",
        "up_blocks.1.attentions.1": "output_blocks.3.1",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
    renamed = {}
    for name, value in state.items():
        block = next(b for b in blocks if name.startswith(f"{b}."))
        rest = name[len(block) + 1 :]
        if ".resnets." in f".{block}":
            inner, leaf = rest.rsplit(".", 1)
            rest = f"{resnet[inner]}.{leaf}"
        renamed[f"model.diffusion_model.{blocks[block]}.{rest}"] = value
    return renamed


@pytest.mark.parametrize("suffix", ["safetensors", "ckpt"])
@pytest.mark.parametrize("names", [dict, original_names])
def test_a_unet_comes_from_one_file_without_asking_the_hub(
    folder: Path, tmp_path: Path, suffix: str, names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", no_network)
    saved = UNet2DConditionModel.from_pretrained(folder / "unet")
    file, state = tmp_path / f"model.{suffix}", names(saved.state_dict())
    save_file(state, file) if suffix == "safetensors" else torch.save({"state_dict": state}, file)
    source = Source(path=str(file))
    unet = diffusers_part(UNet2DConditionModel, UNET, source, "unet")
    found = unet.state_dict()
    assert all(torch.equal(found[n], v) for n, v in saved.state_dict().items())
    assert not source.has_tokenizer


def no_network(*arguments: Any) -> None:
    raise AssertionError(f"the network was asked: {arguments}")


@pytest.mark.parametrize("kind", [AutoencoderKL, ControlNetModel])
def test_single_parts_come_from_files_of_their_own(
    folder: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", no_network)
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    model = AutoencoderKL(**VAE) if kind is AutoencoderKL else ControlNetModel.from_unet(unet)
    save_file(model.state_dict(), tmp_path / "part.safetensors")
    part = "vae" if kind is AutoencoderKL else "controlnet"
    source = Source(path=str(folder), parts={part: str(tmp_path / "part.safetensors")})
    config = {k: v for k, v in model.config.items() if not k.startswith("_")}
    found = source.load(kind, part, config).state_dict()
    assert all(torch.equal(found[n], v) for n, v in model.state_dict().items())
    model.save_pretrained(tmp_path / "alone")
    again = Source(parts={part: str(tmp_path / "alone")}).load(kind, part).state_dict()
    assert all(torch.equal(again[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("shards", ["10GB", "20KB"])
def test_in_a_recording_each_weight_is_read_when_it_is_asked_for(
    folder: Path, tmp_path: Path, shards: str
) -> None:
    eager = UNet2DConditionModel.from_pretrained(folder / "unet")
    eager.save_pretrained(tmp_path / "unet", max_shard_size=shards)
    assert (len(list((tmp_path / "unet").glob("*.safetensors"))) > 1) == (shards == "20KB")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with recording() as made:
        later = Source(path=str(tmp_path)).load(UNet2DConditionModel, "unet")
        copy = ControlNetModel.from_unet(later)
    assert all(p.is_meta for p in (*later.parameters(), *copy.parameters()))
    assert not later.training
    for name, value in eager.state_dict().items():
        assert torch.equal(made.value(later.state_dict()[name]), value)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)
    plain = ControlNetModel.from_unet(eager)
    for name, parameter in copy.named_parameters():
        assert torch.equal(made.value(parameter), plain.get_parameter(name)), name


def test_what_cannot_be_found_is_said_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", no_network)
    gone = tmp_path / "gone"
    with pytest.raises(SpecError, match="there is no folder"):
        Source(path=str(gone)).load(AutoencoderKL, "vae")
    with pytest.raises(SpecError, match=r"gone\.ckpt, but there is no such file"):
        Source(path=f"{gone}.ckpt").load(AutoencoderKL, "vae", VAE)
    file = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(1)}, file)
    with pytest.raises(SpecError, match="give the configuration of vae"):
        Source(path=str(file)).load(AutoencoderKL, "vae")
    with pytest.raises(SpecError, match=r"vae cannot be read from .*a\.safetensors"):
        Source(path=str(file)).load(AutoencoderKL, "vae", VAE)


def test_offline_a_missing_revision_is_named() -> None:
    code = (
        "from diffusers import AutoencoderKL\n"
        "from lightning_dpipe.models.parts import Source\n"
        "Source(path='no-such/model', revision='abc').load(AutoencoderKL, 'vae')\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=False
    )
    last = [line for line in done.stderr.splitlines() if "SpecError" in line][-1]
    assert "vae of 'no-such/model' revision 'abc' cannot be loaded (offline" in last

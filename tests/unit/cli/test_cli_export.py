"""``dpipe export`` from the command line."""

from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.cli.app import run_app
from lightning_dpipe.cli.parts import build_module


def test_a_recipes_checkpoint_becomes_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = []

    def save(config: object) -> None:
        module = build_module(config)  # type: ignore[arg-type]
        module.configure_model()
        states.append(module.state_dict())
        torch.save({"state_dict": states[0], "global_step": 3}, tmp_path / "a.ckpt")

    assert run_app(save, prefix=("train",), arguments=["recipe=sd21_tiny"]) == 0
    out = tmp_path / "out"
    command = ["export", "recipe=sd21_tiny", f"ckpt_path={tmp_path / 'a.ckpt'}", f"out={out}"]
    assert main(command) == 0
    assert "unet" in capsys.readouterr().out
    unet = UNet2DConditionModel.from_pretrained(out / "unet")
    assert torch.equal(unet.conv_in.weight, states[0]["unet.conv_in.weight"])
    assert main(command) == 2
    assert f"{out} is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out=x"], "needs ckpt_path="),
        (["ckpt_path=x"], "needs out="),
        (["ckpt_path=gone.ckpt", "out=x"], "gone.ckpt does not exist"),
    ],
)
def test_what_is_missing_is_asked_for(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "recipe=sd21_tiny", *arguments]) == 2
    assert message in capsys.readouterr().err

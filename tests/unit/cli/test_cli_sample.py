"""``dpipe sample`` from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_dpipe.cli.__main__ import main
from lightning_dpipe.cli.app import run_app
from lightning_dpipe.cli.parts import build_module
from lightning_dpipe.sampling.grid import to_picture


def _saved(path: Path, recipe: str, *overrides: str) -> torch.Tensor:
    """Write a checkpoint of random weights; what the module itself draws of labels 1, 4."""
    drawn = []

    def save(config: object) -> None:
        torch.manual_seed(5)
        module = build_module(config)  # type: ignore[arg-type]
        module.configure_model()
        with torch.no_grad():
            for p in module.parameters():  # its last layers are zero at first
                p.add_(0.05 * torch.randn(p.shape))
        torch.save({"state_dict": module.state_dict(), "global_step": 3}, path)
        draws = module.eval().draw_samples
        drawn.append(draws({"label": torch.tensor([1, 4])}, num_steps=4, guidance=2.0))

    assert run_app(save, prefix=("train",), arguments=[f"recipe={recipe}", *overrides]) == 0
    return drawn[0]


def _pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_labels_of_a_file_are_drawn_exactly_and_in_patches(tmp_path: Path) -> None:
    want = _saved(tmp_path / "a.ckpt", "dit_tiny")
    (tmp_path / "p.txt").write_text("1\n\n4\n")
    command = [
        "sample", "recipe=dit_tiny", f"ckpt_path={tmp_path / 'a.ckpt'}", "num_steps=4",
        f"prompts={tmp_path / 'p.txt'}", "guidance=2.0", "seed=1",
    ]  # fmt: skip
    assert main([*command, f"out={tmp_path / 'exact'}"]) == 0
    for i in range(2):
        assert (_pixels(tmp_path / f"exact/0000{i}.png") == np.asarray(to_picture(want[i]))).all()
    told = json.loads((tmp_path / "exact/samples.json").read_text())
    assert [s["prompt"] for s in told["samples"]] == ["1", "4"]
    assert told["plan"]["mode"] == "exact"
    assert told["global_step"] == 3
    assert (tmp_path / "exact/grid.png").is_file()
    stale = ["mode=pipefusion", "patches=2", f"out={tmp_path / 'stale'}"]
    assert main([*command, *stale]) == 0
    warm = ["mode=pipefusion", "patches=2", "warmup=4", f"out={tmp_path / 'warm'}"]
    assert main([*command, *warm]) == 0
    exact = _pixels(tmp_path / "exact/00000.png").astype(int)
    assert abs(_pixels(tmp_path / "warm/00000.png") - exact).max() <= 1, "all steps are whole"
    assert (_pixels(tmp_path / "stale/00000.png") != exact).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=dit_tiny", "out=o"], "needs ckpt_path="),
        (["recipe=dit_tiny", "ckpt_path=a.ckpt"], "needs out="),
        (["recipe=dit_tiny", "ckpt_path=gone.ckpt", "out=o"], "gone.ckpt does not exist"),
        (["recipe=dit_tiny", "prompts=empty.txt", "out=o"], "has no prompt"),
        (["recipe=dit_tiny", "prompts=gone.txt", "out=o"], "gone.txt does not exist"),
        (["recipe=dit_tiny", "mode=fast", "out=o"], "modes are exact, pipefusion"),
        (["recipe=dit_tiny", "patches=2", "out=o"], "patches need mode=pipefusion"),
        (["recipe=dit_tiny", "mode=pipefusion", "out=o"], "needs patches=N"),
    ],
)
def test_what_is_missing_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").write_text("\n \n")
    assert main(["sample", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "prompt", "more", "message"),
    [
        ("dit_tiny", "9", (), "prompt '9' is no class; this model reads labels from 0 to 5"),
        ("pixart_tiny", "a red circle", (), "CirclesDataModule has no tokenizer for prompts"),
        ("sd21_tiny", None, ("mode=pipefusion", "patches=2"), "sample it in one process"),
    ],
)
def test_what_a_model_cannot_draw_is_refused(
    recipe: str,
    prompt: str | None,
    more: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def save(config: object) -> None:
        module = build_module(config)  # type: ignore[arg-type]
        module.configure_model()
        torch.save({"state_dict": module.state_dict()}, "a.ckpt")

    assert run_app(save, prefix=("train",), arguments=[f"recipe={recipe}"]) == 0
    command = ["sample", f"recipe={recipe}", "ckpt_path=a.ckpt", "out=o", *more]
    if prompt is not None:
        Path("p.txt").write_text(prompt)
        command.append("prompts=p.txt")
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not Path("o").exists()

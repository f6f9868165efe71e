"""Real ranks on a folder with broken files: one decision, and the same steps on all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dpipe.data.circles_folder import write_circles
from saved import save_pipeline

pytestmark = pytest.mark.dist


def train(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "NETRC": str(folder / "netrc")}
    command = (
        "train", "recipe=sd21_tiny", "data=image_folder", f"data.path={folder / 'set'}",
        f"model.pretrained={folder / 'pipeline'}", "model.image_size=32", "model.num_tokens=7",
        "model.scheduler=null", "trainer.devices=2", "strategy.num_stages=2", "data.batch_size=4",
        "data.num_validation=2", "data.num_workers=1", "~callbacks.sample_grid",
        "trainer.max_epochs=2", "trainer.max_steps=-1",
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "lightning_dpipe.cli", *command, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_two_ranks_leave_out_the_same_files_and_refuse_alike(tmp_path: Path) -> None:
    save_pipeline(tmp_path / "pipeline")
    write_circles(tmp_path / "set", num=20, size=32)
    for i in (3, 8, 9):
        path = tmp_path / "set" / "images" / f"0000{i}.png"
        path.write_bytes(path.read_bytes()[:-40])
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "set").rglob("*")}
    done = train(tmp_path, "data.broken_images=skip")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    # 20 - 3 broken - 2 held out = 15; one is repeated for the second rank, 16 = 2 x 8.
    assert said.count("damaged or cut short: 3") == 1
    assert "15 images to train on, 2 held out" in said
    assert "8 samples per step (4 per device), 2 steps per epoch" in said
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "set").rglob("*")} == before
    done = train(tmp_path, "data.check=decode")
    said = done.stdout + done.stderr
    assert done.returncode == 2, said[-4000:]
    assert said.count("00003.png cannot be decoded") == 1
    assert "(2 more such faults: `dpipe doctor` lists all)" in said
    assert "Traceback" not in said

"""`dpipe train` with real ranks: one run a job, whole checkpoints, everything where it says."""

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from wandb.proto import wandb_internal_pb2

pytestmark = pytest.mark.dist

QUICK = ("recipe=smoke", "trainer.devices=2", "data.batch_size=4", "strategy.num_microbatches=2")

LOGGED = {
    "epoch", "lr", "pipeline/bubble_ratio", "pipeline/bubble_ratio_unfilled",
    "pipeline/fill_ratio", "pipeline/prediction_error", "time/backward_s", "time/bubble_s",
    "time/data_s", "time/forward_s", "time/frozen_s", "time/host_s", "time/sync_s",
    "time/transfer_s", "train/grad_norm", "train/loss", "train/samples_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run has measured serves the next."""
    return tmp_path_factory.mktemp("profiles")


def dpipe(
    profiles: Path, folder: Path, *arguments: str, timeout_s: float = 240
) -> "subprocess.CompletedProcess[str]":
    """Run the command in `folder`, without the user's W&B login."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"XDG_CACHE_HOME": str(profiles), "NETRC": str(folder / "netrc")}
    return subprocess.run(
        [sys.executable, "-m", "lightning_dpipe.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def named(text: str, name: str) -> list[str]:
    """Values of the summary's line `name`, one a run."""
    return re.findall(rf"^{name} {{2,}}(.*)$", text, flags=re.MULTILINE)


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of an offline run: LevelDB's log format, blocks of 32 KiB, after a header of 7."""
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def test_a_run_says_where_everything_is_and_it_is_there(profiles: Path, tmp_path: Path) -> None:
    done = dpipe(
        profiles,
        tmp_path,
        "train",
        *QUICK,
        "callbacks=ema",
        "callbacks.ema.decay=0.0",
        "trainer.max_steps=16",
        "callbacks.ledger.every_n_steps=3",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = named(done.stdout, "bubble")
    assert re.fullmatch(r"predicted [\d.]+% with .* up front, [\d.]+% with .* bubbles", before)
    figure = r"[\d.]+% \(predicted [\d.]+%\)"
    assert re.fullmatch(rf"unfilled {figure}, filled {figure}", after)
    assert "8 samples per step (4 per device)" in named(done.stdout, "batch")[0]
    assert re.match(r"[\d.]+ samples/s \(13 steps", named(done.stdout, "speed")[0])
    assert "places: red circle " in named(done.stdout, "ranks")[0]
    for name in ("samples", "timeline", "checkpoint", "folder"):
        (path,) = named(done.stdout, name)
        assert Path(path).exists()
    run_folder = Path(named(done.stdout, "W&B run")[0].split(" (upload")[0])
    assert [p.name for p in run_folder.parent.glob("offline-run-*")] == [run_folder.name]
    records = list(wandb_records(next(run_folder.glob("*.wandb"))))
    history = [item for r in records for item in r.history.item]
    assert {item.key or "/".join(item.nested_key) for item in history} >= LOGGED
    assert {"samples/count", "timeline/count"} <= {"/".join(i.nested_key) for i in history}
    assert [r.artifact.type for r in records if r.HasField("artifact")] == ["plan"]
    config = {item.key for r in records for item in (*r.config.update, *r.run.config.update)}
    assert {"model", "data", "strategy", "trainer", "callbacks", "seed"} <= config
    folder = Path(named(done.stdout, "folder")[0])
    assert (folder / "plan.json").exists()
    assert len(list(tmp_path.glob("**/.hydra/config.yaml"))) == 1

    saved = torch.load(named(done.stdout, "checkpoint")[0], weights_only=False)
    average: Any = next(v for k, v in saved["callbacks"].items() if k.startswith("EMA"))["average"]
    trained = {n for n in saved["state_dict"] if n.startswith("unet.")}
    assert set(average) == trained
    # Without a past the average is the weights, of every stage.
    assert all(torch.equal(average[n], saved["state_dict"][n]) for n in trained)


def test_a_sweep_trains_its_good_jobs_and_reports_its_bad_ones(
    profiles: Path, tmp_path: Path
) -> None:
    done = dpipe(
        profiles,
        tmp_path,
        "train",
        "-m",
        *QUICK,
        "strategy.num_stages=3,2",
        "seed=1,2",
        "trainer.max_steps=3",
        "~callbacks.sample_grid",
        "callbacks.progress_bar.refresh_rate=0",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("dpipe: 2 ranks cannot form pipelines of 3 devices") == 2
    assert "Traceback" not in done.stderr
    jobs = sorted(tmp_path.glob("multirun/*/*/*/.hydra"))
    assert [job.parent.name for job in jobs] == ["0", "1", "2", "3"]
    assert len(list(tmp_path.glob("**/.hydra"))) == 4
    checkpoints = [job.parent / "checkpoints" / "last.ckpt" for job in jobs]
    assert [path.exists() for path in checkpoints] == [False, False, True, True]
    for job in jobs[2:]:
        assert len(list((job.parent / "wandb").glob("offline-run-*"))) == 1
    one, two = (torch.load(path, weights_only=False)["state_dict"] for path in checkpoints[2:])
    assert not torch.equal(one["unet.conv_in.weight"], two["unet.conv_in.weight"])

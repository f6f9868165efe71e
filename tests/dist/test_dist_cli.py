"""`dpipe train` with real ranks: one run a job, whole checkpoints, everything where it says."""

import contextlib
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
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
    paths = (str(Path(__file__).parent), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
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


def jobs_of(folder: Path) -> list[Path]:
    """Output folders of a sweep, after checking that each job has one ``.hydra`` and no other."""
    found = sorted(path.parent for path in folder.glob("multirun/*/*/*/.hydra"))
    assert len(list(folder.glob("**/.hydra"))) == len(found)
    return found


def runs_of(job: Path) -> list[Any]:
    """Records of a job's only W&B run."""
    (path,) = (job / "wandb").glob("offline-run-*/*.wandb")
    return list(wandb_records(path))


def exit_codes(jobs: list[Path]) -> list[int]:
    """How W&B says that each job ended."""
    return [r.exit.exit_code for job in jobs for r in runs_of(job) if r.HasField("exit")]


def report_of(text: str) -> list[list[str]]:
    """Cells of the table of jobs, without its head."""
    table = text.split("\nsweep ")[1].splitlines()[2:]
    return [re.split(r" {2,}", line) for line in table if line[:1].isdigit()]


def left_running(mark: Path) -> list[str]:
    """Processes that a sweep marked by its profile cache has left, after some time to end."""
    deadline_s = time.monotonic() + 15
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("XDG_CACHE_HOME") == str(mark):
                    found.append(" ".join(process.cmdline()))
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.2)


def test_a_sweep_outlives_a_job_that_loses_a_rank(profiles: Path, tmp_path: Path) -> None:
    done = dpipe(
        profiles,
        tmp_path,
        "train",
        "-m",
        *QUICK[:-1],
        "strategy.num_microbatches=2,4",
        "seed=1,2",
        "trainer.max_steps=3",
        "~callbacks.sample_grid",
        "callbacks.progress_bar.refresh_rate=0",
        "+callbacks.fault={_target_: sweep_fault.RankFails, num_microbatches: 4, seed: 1}",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert left_running(profiles) == []
    jobs = jobs_of(tmp_path)
    assert [job.name for job in jobs] == ["0", "1", "2", "3"]
    checkpoints = [job / "checkpoints" / "last.ckpt" for job in jobs]
    assert [path.exists() for path in checkpoints] == [True, True, False, True]
    assert exit_codes(jobs) == [0, 0, 1, 0]

    assert done.stderr.count("RuntimeError: rank 1 of this job fails on purpose") >= 1
    assert "Error executing job" not in done.stdout + done.stderr
    rows = report_of(done.stdout)
    choices = [f"strategy.num_microbatches={m} seed={s}" for m in (2, 4) for s in (1, 2)]
    assert [row[:3] for row in rows] == [
        [str(i), choice, "FAILED" if i == 2 else "done"] for i, choice in enumerate(choices)
    ]
    assert [tmp_path / row[-1] for row in rows] == jobs
    assert "\njob 2: rank 1 (stage 0) failed: RuntimeError: rank 1 of this" in done.stdout
    # Micro-batches change no number, seeds do.
    losses = [row[4] for row in rows]
    assert losses[1] == losses[3] != losses[0] and losses[2] == "-"
    one, two = (torch.load(checkpoints[i], weights_only=False)["state_dict"] for i in (0, 1))
    assert not torch.equal(one["unet.conv_in.weight"], two["unet.conv_in.weight"])


def test_a_sweep_changes_its_ranks_and_refuses_what_does_not_fit(
    profiles: Path, tmp_path: Path
) -> None:
    """On the cascade: both losses reach the logger, and pictures are drawn small, then large."""
    done = dpipe(
        profiles,
        tmp_path,
        "train",
        "-m",
        "recipe=cdm_tiny",
        "trainer.devices=2,1",
        "strategy.num_stages=null,3",
        "strategy.num_microbatches=2",
        "trainer.max_steps=2",
        "trainer.log_every_n_steps=1",
        "callbacks.sample_grid.num_steps=1",
        "callbacks.progress_bar.refresh_rate=0",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert left_running(profiles) == []
    assert done.stderr.count("dpipe: 2 ranks cannot form pipelines of 3 devices") == 1
    assert "Traceback" not in done.stderr
    jobs = jobs_of(tmp_path)
    rows = report_of(done.stdout)
    assert [row[2] for row in rows] == ["done", "FAILED", "done", "FAILED"]
    assert [float(row[4]) > 0 for row in rows if row[2] == "done"] == [True, True]
    assert [(job / "samples.png").exists() for job in jobs] == [True, False, True, False]
    for job in (jobs[0], jobs[2]):
        items = [item for r in runs_of(job) for item in r.history.item]
        logged = {item.key or "/".join(item.nested_key) for item in items}
        assert logged >= {"train/loss", "train/loss/base", "train/loss/sr"}

"""Reports, and how a rank finds the cause of what it only suffers from."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_dpipe.core.errors import PlanError, RankError
from lightning_dpipe.strategy.failure import is_consequence, report_of, report_of_exit
from lightning_dpipe.strategy.watch import Watch, end_all, outlast


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(master.port))
    return master


def watch(rank: int, **kwargs: object) -> Watch:
    return Watch(rank=rank, world_size=2, name_of=lambda r: f"rank {r} (stage {1 - r})", **kwargs)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RankError("gone"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 1000ms for recv operation"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (PlanError("no"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_only_lost_connections_are_consequences(error: Exception, expected: bool) -> None:
    assert is_consequence(error) is expected


def test_a_killed_process_is_named_with_its_stage_and_signal() -> None:
    report = report_of_exit(1, "rank 1 (stage 0)", -9)
    assert str(report) == "rank 1 (stage 0) was killed by SIGKILL"
    assert str(report_of_exit(1, "rank 1", 3)) == "rank 1 ended with exit code 3"


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_failing_ranks_traceback_is_what_other_machines_print(
    node: str,
    store: dist.TCPStore,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = watch(0), watch(1)
    monkeypatch.setenv("NODE_RANK", "0")
    try:
        raise ArithmeticError("boom")
    except ArithmeticError as error:
        first.fail(error, "stage 1, backward, micro-batch 2 (op 1B2)")
    monkeypatch.setenv("NODE_RANK", node)
    second.fail(RankError("lost rank 0"), "waiting for message x")
    printed = capfd.readouterr().err
    head = "[rank 1] rank 0 (stage 1) failed in stage 1, backward, micro-batch 2 (op 1B2): "
    # On its own machine the failed process has printed it already: once is enough.
    traceback = "Traceback" if node == "1" else ""
    assert printed.startswith(f"{head}ArithmeticError: boom\n{traceback}")
    assert ("Traceback" in printed) == (node == "1")
    assert second.report is not None
    assert second.report.rank == 0


def test_the_first_failure_wins_and_a_new_run_starts_clean(store: dist.TCPStore) -> None:
    first, second = watch(0), watch(1)
    first.fail(ValueError("a"), "")
    second.fail(ValueError("b"), "")
    found = first._board.read()
    assert found is not None
    assert found.rank == 0
    assert "ValueError: a" in found.text
    watch(0)
    assert first._board.read() is None


def test_a_lost_connection_without_any_cause_is_reported_as_ones_own(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_dpipe.strategy.watch.ERROR_WAIT_S", 0.1)
    report = watch(1).fail(RankError("lost rank 0"), "")
    assert report == report_of(RankError("lost rank 0"), 1, "rank 1 (stage 0)", "")


def test_the_watch_sees_a_killed_child_and_tells_the_others(
    store: dist.TCPStore, capfd: pytest.CaptureFixture[str]
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    parent = watch(0, children=[child])
    parent.start()
    child.kill()
    deadline_s = time.monotonic() + 20
    while parent.report is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    parent.stop()
    assert "rank 1 (stage 0) was killed by SIGKILL" in capfd.readouterr().err
    found = watch(1)._board.read()
    assert found is not None
    assert found.summary == "rank 1 (stage 0) was killed by SIGKILL"


def test_a_silent_rank_is_named_and_one_that_left_in_order_is_not(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_dpipe.strategy.watch._SILENCE_S", 0.0)
    looking, heard = watch(0), {}
    board = looking._board
    board.beat(1, 5)
    assert looking._silent(board, heard) is None
    time.sleep(0.01)
    report = looking._silent(board, heard)
    assert report is not None
    assert report.summary.startswith("rank 1 (stage 0) gave no sign of life")
    watch(1).stop()
    heard.clear()
    looking._silent(board, heard)
    time.sleep(0.01)
    assert looking._silent(board, heard) is None


def test_children_that_do_not_end_are_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    end_all([child], patience_s=0.1)
    assert child.returncode == -9
    assert not os.path.exists(f"/proc/{child.pid}/task")


def test_a_child_finishes_its_files_before_the_launching_process_leaves(tmp_path: Path) -> None:
    code = "import sys, time, pathlib; time.sleep(1); pathlib.Path(sys.argv[1]).touch()"
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)]) for name in ("a", "b")
    ]
    outlast(children)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}
    stuck = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    outlast([stuck], patience_s=0.2)
    assert stuck.returncode is not None

"""Watch over the ranks of a job, so that nothing hangs and nothing is left behind.

In:     the job's store, the launching process's children, this process's parent.
Out:    when a rank fails or dies, its report on stderr of every other rank and an end within 30 s.

A thread looks twice a second: has a failure been posted, has a child ended, is the parent gone, has
a rank given no sign of life for 15 s. The main thread then usually fails by itself (its peer closed
the connection); if it does not, the thread ends the process.
"""

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from lightning_dpipe.strategy.failure import (
    ERROR_WAIT_S,
    Board,
    Report,
    is_consequence,
    report_of,
    report_of_exit,
    this_node,
)
from lightning_dpipe.strategy.launcher import PARENT

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SILENCE_S = 15.0
_GRACE_S = 8.0
"""How long a process may take to end by itself once it knows of a failure."""
_EARLY_GRACE_S = 3.0


class Watch:
    """This rank's view of the job. `name_of` names a rank by stage, as people know it."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        name_of: Callable[[int], str],
        children: Sequence["subprocess.Popen[bytes]"] = (),
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.children = children
        self.report: Report | None = None
        self._name_of = name_of
        self._stop = threading.Event()
        self._printed = threading.Lock()
        self._board = Board()
        if rank == 0:
            self._board.clear()
        self._thread = threading.Thread(target=self._run, name="dpipe-watch", daemon=True)

    def start(self) -> None:
        """Start looking. Collective only in that every rank should do it."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking: the run is over on this rank, whatever happened."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _LOOK_S + 5)
        if self.report is None:
            with contextlib.suppress(RuntimeError):  # the store's host may have left already
                self._board.beat(self.rank, -1)

    def fail(self, error: BaseException, where: str) -> Report:
        """Take note of an exception on this rank: post it, or find the failure it follows from."""
        if self.report is not None:
            return self.report
        if is_consequence(error):
            found = self._cause()
            if found is not None and found.rank != self.rank:
                self.report = found
                self._print(found)
                return found
        self.report = report_of(error, self.rank, self._name_of(self.rank), where)
        with contextlib.suppress(RuntimeError):  # no store any more: rank 0 is gone, nobody listens
            self._board.post(self.report)
        return self.report

    def leave(self) -> None:
        """After a failure: let the others read it, then make sure that no process stays.

        The launching process waits for its children and ends those that do not end. Another
        process will skip the teardown of torch's process groups when Python exits: with a peer
        gone it may hang.
        """
        if self.children:
            end_all(self.children, patience_s=_GRACE_S)
        elif self.world_size > 1:
            atexit.register(_exit_now)
            if self.rank == 0:  # hosts the store
                time.sleep(2 * ERROR_WAIT_S)

    def _cause(self) -> Report | None:
        try:
            return self._board.wait(ERROR_WAIT_S)
        except RuntimeError:  # the store went with its host
            return self._gone(0)

    def _gone(self, rank: int) -> Report:
        return Report(
            rank=rank, summary=f"{self._name_of(rank)} is gone: its process ended", text=""
        )

    def _print(self, report: Report) -> None:
        if self._printed.acquire(blocking=False):
            text = report.as_seen_from(this_node())
            print(f"[rank {self.rank}] {text}", file=sys.stderr, flush=True)

    def _run(self) -> None:
        board, count = Board(), 0
        heard: dict[int, tuple[int, float]] = {}
        while not self._stop.wait(_LOOK_S):
            count += 1
            found = self._look(board, count, heard)
            if found is None:
                continue
            if self.report is None:
                self.report = found
                self._print(found)
            if not self._stop.wait(_GRACE_S):
                self._end()
            return

    def _look(self, board: Board, count: int, heard: dict[int, tuple[int, float]]) -> Report | None:
        """One look around; a failure seen first here is posted for the others."""
        if self.report is not None:
            return self.report
        found = self._ended_child()
        try:
            if found is not None:
                posted = board.wait(ERROR_WAIT_S / 2)  # its own words, if it had time for them
                if posted is None:
                    board.post(found)
                return posted or found
            if (found := board.read()) is not None:
                return found if found.rank != self.rank else None
            if count % 4 == 1:
                board.beat(self.rank, count)
                found = self._silent(board, heard)
        except RuntimeError:
            return self._gone(0) if self.rank else found
        if found is not None:
            with contextlib.suppress(RuntimeError):
                board.post(found)
        return found

    def _ended_child(self) -> Report | None:
        for local_rank, child in enumerate(self.children, start=1):
            code = child.poll()
            if code:
                rank = self.rank + local_rank
                return report_of_exit(rank, self._name_of(rank), code)
        return None

    def _silent(self, board: Board, heard: dict[int, tuple[int, float]]) -> Report | None:
        now_s = time.monotonic()
        for rank, count in board.beats(self.world_size).items():
            if rank not in heard or heard[rank][0] != count:
                heard[rank] = (count, now_s)
            elif count >= 0 and now_s - heard[rank][1] > _SILENCE_S:
                name = self._name_of(rank)
                quiet_s = int(now_s - heard[rank][1])
                return Report(
                    rank=rank, summary=f"{name} gave no sign of life for {quiet_s} s", text=""
                )
        return None

    def _end(self) -> None:
        if self.children:
            end_all(self.children, patience_s=0.0)
        sys.stderr.flush()
        os._exit(1)


class Nursery:
    """Watches launched children until the ranks have met and `Watch` takes over.

    A child that fails before (an import error) would leave this process waiting for it to join.
    """

    def __init__(self, children: Sequence["subprocess.Popen[bytes]"]) -> None:
        self._children = children
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dpipe-nursery", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def stop(self) -> None:
        """The children have joined, or this process is ending by itself."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            codes = [child.poll() for child in self._children]
            failed = next((i for i, code in enumerate(codes) if code), None)
            if failed is None:
                continue
            # The same may be about to happen here, with a better message.
            if self._stop.wait(_EARLY_GRACE_S):
                return
            report = report_of_exit(failed + 1, f"rank {failed + 1}", codes[failed] or 0)
            print(f"[rank 0] {report} before it joined the others", file=sys.stderr, flush=True)
            end_all(self._children, patience_s=0.0)
            os._exit(1)


def end_all(children: Sequence["subprocess.Popen[bytes]"], *, patience_s: float) -> None:
    """Wait for child processes to end, then kill the rest."""
    deadline_s = time.monotonic() + patience_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline_s - time.monotonic()))
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def outlast(children: Sequence["subprocess.Popen[bytes]"], *, patience_s: float = 300.0) -> None:
    """Let child processes finish what they do after the run, a larger stage's files say.

    They end with the launching process (`follow_parent`), so that one leaves last.
    """
    deadline_s = time.monotonic() + patience_s
    told_s = time.monotonic() + _SILENCE_S
    while any(child.poll() is None for child in children) and time.monotonic() < deadline_s:
        if time.monotonic() > told_s:
            busy = [str(i) for i, c in enumerate(children, start=1) if c.poll() is None]
            print(
                f"[rank 0] done; waiting up to {patience_s:.0f} s for local ranks "
                f"{', '.join(busy)} to finish",
                file=sys.stderr,
                flush=True,
            )
            told_s = deadline_s
        time.sleep(0.02)
    end_all(children, patience_s=0.0)


def follow_parent() -> None:
    """In a launched child: end when the launching process is gone, however it ended."""
    parent = int(os.environ.get(PARENT, "0"))
    if not parent:
        return

    def body() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        rank = os.environ.get("LOCAL_RANK", "?")
        # Rank 0 is the last stage of its pipeline and launches the others (`default_groups`).
        print(
            f"[rank {rank}] rank 0 (last stage) is gone: process {parent} ended; ending too",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=body, name="dpipe-parent", daemon=True).start()


def _exit_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

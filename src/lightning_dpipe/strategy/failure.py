"""What a rank leaves behind when it fails, and how the others tell a cause from a consequence.

In:     an exception on this rank, or the end of another process.
Out:    one `Report`, the first that any rank posted to the job's store. Ranks that only lost a
        connection look there before they blame themselves.
"""

import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_dpipe.core.errors import RankError

ERROR_WAIT_S = 2.0
"""How long a rank that lost a connection waits for the cause to be posted."""

_KEY = "dpipe/error"
_BEAT = "dpipe/beat"
_LOST = (
    "gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe",
    "timed out", "socket", "process group",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Why a job ends. `text` is the failed rank's own traceback; empty when it was killed.

    `node` is the machine of that rank, as its launcher counts them.
    """

    rank: int
    summary: str
    text: str
    node: str = "0"

    def __str__(self) -> str:
        return f"{self.summary}\n{self.text}" if self.text else self.summary

    def as_seen_from(self, node: str) -> str:
        """The traceback only where the failed rank's own console is not at hand."""
        return self.summary if node == self.node else str(self)


def this_node() -> str:
    """Number of this machine: Lightning's and our launcher's, torchrun's, or SLURM's."""
    names = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def report_of(error: BaseException, rank: int, name: str, where: str) -> Report:
    """Describe this rank's own failure. `where` names the instruction, if a step was running."""
    at = f" in {where}" if where else ""
    text = "".join(traceback.format_exception(error))
    return Report(
        rank=rank,
        summary=f"{name} failed{at}: {type(error).__name__}: {error}",
        text=text,
        node=this_node(),
    )


def report_of_exit(rank: int, name: str, returncode: int) -> Report:
    """Describe a process that ended without saying why."""
    if returncode < 0:
        how = f"was killed by {signal.Signals(-returncode).name}"
    else:
        how = f"ended with exit code {returncode}"
    return Report(rank=rank, summary=f"{name} {how}", text="")


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    if isinstance(error, RankError | dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


class Board:
    """The job's store as a notice board: the first failure, and a sign of life of every rank.

    Each thread needs a board of its own, because a blocking call holds the connection's lock.
    """

    def __init__(self) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=5),
        )

    def post(self, report: Report) -> None:
        """Post a failure unless another one is there already."""
        self._store.compare_set(_KEY, "", json.dumps(asdict(report)))

    def read(self) -> Report | None:
        """The first failure, if any."""
        if not self._store.check([_KEY]):
            return None
        return Report(**json.loads(self._store.get(_KEY)))

    def wait(self, seconds: float) -> Report | None:
        """Wait for a failure to be posted."""
        deadline_s = time.monotonic() + seconds
        while (found := self.read()) is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found

    def clear(self) -> None:
        """Forget failures of an earlier run in this job."""
        self._store.delete_key(_KEY)

    def beat(self, rank: int, count: int) -> None:
        """Say that this rank is alive; a negative count says that it left in good order."""
        self._store.set(f"{_BEAT}/{rank}", str(count))

    def beats(self, world_size: int) -> dict[int, int]:
        """The last count of every rank that has given one."""
        keys = [f"{_BEAT}/{rank}" for rank in range(world_size)]
        present = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        return {rank: int(self._store.get(keys[rank])) for rank in present}

"""What became of each job of a sweep, one line a job.

In: jobs as they end, with their return value or their error. Out: a table, printed when the sweep
is over. It knows the jobs of this process only, which are all under Hydra's own launcher.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dpipe.core.errors import CAUSE

MESSAGE_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job; `metric` is what it returned, `error` what it raised.

    `outcome` is done, FAILED, or stopped: by a signal, before it could end.
    """

    number: int
    outcome: str
    overrides: tuple[str, ...]
    folder: str
    seconds: float
    metric: float | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Sweep:
    """The jobs so far.

    Args:
        metric: What a job's return value is called when the config names none.
        clock: Seconds since any fixed time.
    """

    metric: str = "train/loss"
    clock: Callable[[], float] = time.monotonic
    jobs: list[Job] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)

    def run(
        self,
        task: Callable[[DictConfig], Any],
        config: DictConfig,
        report: Callable[[Exception], int],
    ) -> Any:
        """Run a job and keep what became of it; `report` prints an error and gives its exit code.

        Hydra's own sweeper would raise the first error once all jobs are done, and write a line
        about it then: it gets None instead. Another sweeper may choose jobs by their values, and
        has to know.
        """
        hydra = HydraConfig.get()
        start = self.clock()
        self.metric = config.get("optimized_metric") or self.metric
        value, failure, outcome = None, None, "stopped"
        try:
            value, outcome = task(config), "done"
        except Exception as error:
            failure, outcome = error, "FAILED"
            self.codes.append(report(error))
            if not hydra.sweeper._target_.endswith("basic_sweeper.BasicSweeper"):
                raise
        finally:
            self.jobs.append(
                Job(
                    number=hydra.job.num,
                    outcome=outcome,
                    overrides=tuple(hydra.overrides.task),
                    folder=os.path.relpath(hydra.runtime.output_dir),
                    seconds=self.clock() - start,
                    metric=float(value) if isinstance(value, int | float) else None,
                    error=failure,
                )
            )
        return value

    def text(self) -> str:
        """One line a job: what makes it differ, what became of it, its value and its folder."""
        common = set.intersection(*(set(job.overrides) for job in self.jobs))
        rows = [("job", "overrides", "outcome", "time", self.metric, "folder")]
        for job in self.jobs:
            own = [o for o in job.overrides if len(self.jobs) == 1 or o not in common]
            rows.append(
                (
                    str(job.number),
                    " ".join(own),
                    job.outcome,
                    f"{job.seconds:.0f} s",
                    "-" if job.metric is None else f"{job.metric:.6g}",
                    job.folder,
                )
            )
        failed = [job for job in self.jobs if job.error is not None]
        head = f"sweep       {len(self.jobs)} jobs, {len(failed)} failed"
        lines = [head, *_columns(rows)]
        lines += [f"job {job.number}: {_brief(job.error)}" for job in failed]
        return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _brief(error: Exception | None) -> str:
    """Kind and start of the error, or of another rank's that caused it; all of it is above."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(CAUSE))
    text = next(notes, f"{type(error).__name__}: {error}").removeprefix(CAUSE)
    text = text.partition("\n")[0].removesuffix(": ")
    return text if len(text) <= MESSAGE_WIDTH else f"{text[: MESSAGE_WIDTH - 3]}..."

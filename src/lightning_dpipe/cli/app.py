"""One Hydra application for all subcommands: compose, run, and report errors as people read them.

In: a task, and argv in two parts: `prefix` (the subcommand and its own flags, which Hydra must not
see) and `arguments` (Hydra's). Out: an exit code. While a job runs, `sys.argv` is the whole command
again, because launchers start the other ranks from it.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_dpipe.cli.console import quiet_libraries
from lightning_dpipe.cli.paths import config_dir
from lightning_dpipe.cli.sweep import Sweep
from lightning_dpipe.core.errors import DPipeError


class JobFailedError(RuntimeError):
    """The job ran to its end and the answer is no; everything worth reading is printed already."""


def run_app(
    task: Callable[[DictConfig], Any], *, prefix: Sequence[str], arguments: Sequence[str]
) -> int:
    """Compose the config from `arguments` and run `task` on it, once or once per sweep job.

    Returns:
        0 done, 1 failed (traceback printed), 2 bad input (one message printed). Of a sweep, the
        code of its first failure; the other jobs run all the same.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let exceptions through: `_report` prints them
    quiet_libraries()
    program = sys.argv[0]
    sweep = Sweep()
    failed: list[Exception] = []

    def job(config: DictConfig) -> Any:
        sys.argv = [program, *prefix, *arguments]
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            return sweep.run(task, config, _report)
        try:
            return task(config)
        except Exception as error:
            failed.append(error)  # Hydra would print a line of its own first
            return None

    before = sys.argv
    sys.argv = [program, *arguments]
    try:
        hydra.main(config_path=str(config_dir()), config_name="config", version_base="1.3")(job)()
    except Exception as error:
        if not any(error is job.error for job in sweep.jobs):  # else it is printed already
            return _report(error)
    finally:
        sys.argv = before
        if sweep.jobs:
            print(f"\n{sweep.text()}", flush=True)
    if sweep.codes:
        return sweep.codes[0]
    return _report(failed[0]) if failed else 0


def _report(error: Exception) -> int:
    """Print an exception: bad input as its message, anything else with its traceback."""
    if isinstance(error, JobFailedError):
        return 1
    cause = error.__cause__
    if isinstance(error, InstantiationException):
        if isinstance(cause, DPipeError):
            error, cause = cause, None
        elif not isinstance(cause, TypeError) or "unexpected keyword" not in str(cause):
            traceback.print_exception(error)
            return 1
    if isinstance(error, FileNotFoundError):
        error = DPipeError(str(error))
    if isinstance(error, DPipeError | HydraException | OmegaConfBaseException):
        rank = os.environ.get("LOCAL_RANK", "0")
        if rank != "0" and str(error).startswith("rank 0: "):
            return 2  # rank 0 says it itself
        where = "dpipe" if rank == "0" else f"dpipe (rank {rank})"
        print(f"{where}: {error}", file=sys.stderr)
        if cause is not None and str(cause) not in str(error):
            print(f"  {cause}", file=sys.stderr)
        return 2
    traceback.print_exception(error)
    return 1

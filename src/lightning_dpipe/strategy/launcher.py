"""Start one process a device: children of a Hydra job run that job, never the whole sweep.

In:     the cluster environment and the number of processes of this node.
Out:    child processes whose end is noticed at once, and which end with this process.

Lightning's stock launcher gives a child the parent's argv. Under ``-m`` each child then runs the
whole sweep in a folder of its own, in step with the parent by luck only. Ours gives a child the
composed overrides of one job and the parent's folder. Between two jobs of one process the
environment that a launch leaves behind is put back, so that the second job launches too.
torchrun and SLURM are detected by Lightning (`creates_processes_externally`); nothing is launched.
"""

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

log = logging.getLogger(__name__)

PARENT = "DPIPE_PARENT_PID"
"""Environment variable with the launching process's id: a child ends when it is gone."""

_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK")

# Hydra overrides of the parent that a child must not repeat.
_DROPPED = (
    "hydra.mode", "hydra.run.dir", "hydra.sweep", "hydra/sweeper", "hydra.sweeper",
    "hydra.launcher", "hydra/launcher", "hydra.job.num", "hydra.job.name", "hydra.job.id",
)  # fmt: skip

# Arguments that are Hydra's; an app's own (``dpipe train --json``) come before the first of them.
_HYDRA_FLAGS = frozenset((
    "-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package",
    "-r", "--run", "-m", "--multirun", "-sc", "--shell-completion", "-cp", "--config-path",
    "-cn", "--config-name", "-cd", "--config-dir", "-i", "--info", "--experimental-rerun",
))  # fmt: skip


@dataclass(slots=True)
class _Launch:
    """The last launch of this process: for which Hydra job, and the environment before it."""

    job: object | None
    before: dict[str, str | None]


@dataclass(slots=True)
class _Record:
    last: _Launch | None = None


_RECORD = _Record()


class DPipeLauncher(_SubprocessScriptLauncher):
    """Lightning's script launcher with other commands and without its observer thread.

    `on_launch` is called in every process before the trainer runs: with the children in the
    launching one, with nothing elsewhere. It watches over them (see `failure`).
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        on_launch: Callable[[Sequence["subprocess.Popen[bytes]"]], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._on_launch = on_launch

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kw: Any
    ) -> Any:
        """Start the children where nobody else does, then run `function`."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
        if "OMP_NUM_THREADS" not in os.environ and self.num_processes > 1:
            _share_cores(self.num_processes)
        self._on_launch(self.procs)
        return function(*args, **kw)

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        if self.num_processes * self.num_nodes == 1:
            return  # LOCAL_RANK in the environment would make the next Trainer launch nothing
        environment = self.cluster_environment
        _RECORD.last = _Launch(
            job=_hydra_job(), before={name: os.environ.get(name) for name in _ENVIRONMENT}
        )
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        self.procs = []
        for local_rank in range(1, self.num_processes):
            command, folder = child_command(local_rank)
            child = {**os.environ, "LOCAL_RANK": str(local_rank), PARENT: str(os.getpid())}
            self.procs.append(subprocess.Popen(command, env=child, cwd=folder))


def _share_cores(num_processes: int) -> None:
    """Give each rank of this node an equal share of the cores, unless the user said otherwise."""
    import torch

    threads = max(1, (os.cpu_count() or 1) // num_processes)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


def child_command(local_rank: int) -> tuple[list[str], str | None]:
    """Command and working folder (None: the current one) of one child."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    job = _hydra_job()
    if job is None:
        script = ["-m", spec.name] if spec is not None else [os.path.abspath(sys.argv[0])]
        return [sys.executable, *script, *sys.argv[1:]], None
    from hydra.utils import get_original_cwd, to_absolute_path

    script = ["-m", spec.name] if spec is not None else [to_absolute_path(sys.argv[0])]
    arguments = hydra_arguments(job, sys.argv[1:], local_rank)
    return [sys.executable, *script, *arguments], get_original_cwd()


def hydra_arguments(job: Any, argv: Sequence[str], local_rank: int) -> list[str]:
    """Arguments that make a child run exactly the parent's current job.

    Args:
        job: The parent's ``HydraConfig.get()``.
        argv: The parent's arguments; the app's own and the flags that choose a config are kept.
        local_rank: Names the child's log file.
    """
    own_arguments = takewhile(lambda a: not _is_hydras(a), argv)
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for pair in (("--config-name", "-cn"), ("--config-path", "-cp"), ("--config-dir", "-cd")):
        flags.add_argument(*pair)
    chosen = vars(flags.parse_known_args(list(argv))[0])
    config = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items() if value]
    kept = [o for o in job.overrides.hydra if not o.lstrip("+~").startswith(_DROPPED)]
    own = [
        "hydra.mode=RUN",
        f'hydra.run.dir="{job.runtime.output_dir}"',  # quoted: sweep folders hold "=" and ","
        "hydra.output_subdir=null",  # a child must not rewrite the parent's .hydra/config.yaml
        f"hydra.job.name=rank_{local_rank}",
    ]
    return [*own_arguments, *config, *job.overrides.task, *kept, *own]


def _is_hydras(argument: str) -> bool:
    name = argument.split("=")[0]
    return "=" in argument or name in _HYDRA_FLAGS or argument.startswith(("+", "~"))


def reset_for_new_job(environment: ClusterEnvironment) -> bool:
    """Undo the last launch if it was for another Hydra job; tell whether it was.

    Variables that the user had set come back, the old process group goes, and a new port is chosen:
    otherwise the second job of a sweep believes that it was started by somebody else.
    """
    last = _RECORD.last
    if last is None or last.job is _hydra_job():
        return False
    for name, value in last.before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if hasattr(environment, "_main_port"):
        environment._main_port = -1
    _RECORD.last = None
    return True


def _hydra_job() -> Any | None:
    """Hydra's config of the running job, or None. Hydra is looked at only if the app uses it."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return module.HydraConfig.get()

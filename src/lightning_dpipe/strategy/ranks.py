"""The ranks behind a strategy: processes, process group, what they ask each other, how they end.

In:     Lightning's cluster environment, or torchrun's, or SLURM's.
Out:    a `ParallelStrategy` without a model: `DiffusionPipeStrategy` adds plan, steps and files.
"""

import atexit
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_dpipe.core.errors import CAUSE
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.launcher import DPipeLauncher, reset_for_new_job
from lightning_dpipe.strategy.watch import Nursery, Watch, end_all, follow_parent, outlast


class RankedStrategy(ParallelStrategy):
    """Starts ranks, connects them and watches over them."""

    def __init__(
        self,
        *,
        backend: str | None,
        timeout: timedelta,
        defer_weights: bool = True,
        **lightning: Any,
    ) -> None:
        super().__init__(**lightning)
        self.defers_weights = defer_weights
        self._backend = backend
        self._timeout = timeout
        self._num_nodes = 1
        self._link: HostLink | None = None
        self._watch: Watch | None = None
        self._children: Sequence[subprocess.Popen[bytes]] = ()
        self._nursery: Nursery | None = None

    @property
    def is_distributed(self) -> bool:
        """Without this Lightning would neither inject samplers nor sync logs."""
        return True

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks of this machine."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank loads its own shard, as under DDP."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def link(self) -> HostLink:
        """Host-side messages between ranks."""
        assert self._link is not None, "the process group is not set up yet"
        return self._link

    @property
    def replica_group(self) -> Any:
        """Ranks with the same stages as this one; None if there are no others."""
        return None

    @property
    def failed_at(self) -> str:
        """What this rank was doing when it failed."""
        return ""

    def name_of(self, rank: int) -> str:
        """A rank as messages name it."""
        return f"rank {rank}"

    # Start

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the loggers who this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero.rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if reset_for_new_job(self.cluster_environment):
            self.set_world_ranks()
        self._launcher = DPipeLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self._on_launch
        )

    def _on_launch(self, children: Sequence["subprocess.Popen[bytes]"]) -> None:
        self._children = children
        if children:
            atexit.register(outlast, children)
            self._nursery = Nursery(children)
            self._nursery.start()
        follow_parent()

    def setup_environment(self) -> None:
        """Start the process group, and the watch over it; again for every run of a Trainer."""
        assert self.cluster_environment is not None
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        self._backend = self._backend or _get_default_process_group_backend_for_device(device)
        options: dict[str, Any] = {"timeout": self._timeout}
        if self._backend == "nccl":
            options["device_id"] = device
        _init_dist_connection(self.cluster_environment, self._backend, **options)
        if self._link is None:
            self._link = HostLink(self._timeout)
        if self.world_size > 1:
            self._watch = Watch(
                rank=self.global_rank,
                world_size=self.world_size,
                name_of=self.name_of,
                children=self._children,
            )
            self._watch.start()
        self._leave_nursery()

    # Between ranks

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over `group`, by default the ranks with the same stages as this one.

        Losses are equal within a pipeline; summing them over all ranks would count them twice.
        """
        group = self.replica_group if group is None else group
        if not isinstance(tensor, Tensor) or group is None:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        if str(reduce_op).lower() in ("mean", "avg", "redopttype.avg"):
            return tensor / dist.get_world_size(group)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over `group`, by default the ranks with the same stages as this one."""
        group = self.replica_group if group is None else group
        if group is None:
            return tensor.unsqueeze(0)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agree over all ranks."""
        votes = self.link.gather(int(decision))
        return min(votes) == 1 if all else max(votes) == 1

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, unless one has failed."""
        if self._watch is not None and self._watch.report is None:
            self.link.gather(0)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one rank to all."""
        return obj if self._link is None else self.link.broadcast_object(obj, src)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why, and leave no process behind."""
        self._leave_nursery()
        if not isinstance(exception, Exception):  # Ctrl-C: Lightning itself stops all ranks
            if self._watch is not None:
                self._watch.stop()
        elif self._watch is None:  # refused before the ranks met: all of them refuse alike
            end_all(self._children, patience_s=3.0)
        else:
            report = self._watch.fail(exception, self.failed_at)
            if report.rank != self.global_rank and hasattr(exception, "add_note"):
                exception.add_note(f"{CAUSE}{report.summary}")
            self._watch.leave()

    def _leave_nursery(self) -> None:
        if self._nursery is not None:
            self._nursery.stop()
            self._nursery = None

    def teardown(self) -> None:
        """End a run; process group and cut model stay for the next one."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        if self.lightning_module is not None:
            move(self.lightning_module, torch.device("cpu"))
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()


def move(module: nn.Module, device: torch.device) -> None:
    """Move what is there; weights on meta stay there."""
    apply: Any = module._apply
    apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))

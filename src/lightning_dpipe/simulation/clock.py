"""A step as a graph of tasks, and the clock that walks it.

The order of a device's ops and of an edge's messages is fixed by the schedule, so a TaskGraph does
not depend on when things happen: it is built once (`tasks`) and walked many times while fills are
being placed. One walk with a `Clock` gives every start and end; the walker may let a device do
frozen work before any task, by moving `Clock.free_us` on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.timeline import Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message: it occupies `edge` for `wire_us` and arrives `latency_us` later.

    `edge` is None for a value that stays on its device: it is there at once.
    """

    edge: int | None
    wire_us: int
    latency_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An op (or, with `op` None, a part of the prologue) on one device.

    `length_us` includes what its messages cost the host. `waits` are transfers that must have
    arrived; `sends` are (transfer, microseconds after the start at which it is handed over).
    """

    device: int
    op: Op | None
    activity: Activity
    label: str
    length_us: int
    waits: tuple[int, ...] = ()
    sends: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskGraph:
    """All tasks of one step of one pipeline group, producers before consumers.

    `stage_devices[s]` are the devices of stage s, `sync_us[s]` the length of its gradient
    reduction (0: none), `optimizer_us[d]` that of device d's optimizer step. `traffic` are the
    bytes of all messages by (source, target).
    """

    num_devices: int
    num_edges: int
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]
    stage_devices: tuple[tuple[int, ...], ...]
    sync_us: tuple[int, ...]
    optimizer_us: tuple[int, ...]
    overhead_us: int
    traffic: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def path_us(self) -> tuple[int, ...]:
        """Per task: longest way from its start to the end of the step, without frozen work.

        Messages are taken at full bandwidth, so this is a lower bound when an edge is contended.
        """
        left = [0] * len(self.tasks)
        receive: dict[int, int] = {}
        after = list(self.optimizer_us)
        for i in range(len(self.tasks) - 1, -1, -1):
            task = self.tasks[i]
            rest = after[task.device]
            if task.op is not None and task.op.kind in (OpKind.B, OpKind.W):
                rest = max(rest, self.sync_us[task.op.stage] + self.optimizer_us[task.device])
            rest += task.length_us
            for at, offset_us in task.sends:
                wire = self.transfers[at]
                rest = max(rest, offset_us + wire.wire_us + wire.latency_us + receive.get(at, 0))
            for at in task.waits:
                receive[at] = max(receive.get(at, 0), rest)
            left[i] = after[task.device] = rest
        return tuple(left)


class Clock:
    """State of one walk over a TaskGraph: when devices and edges are free, what has arrived."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.free_us = [0] * graph.num_devices
        self.edge_free_us = [0] * graph.num_edges
        self.sent_us = [0] * len(graph.transfers)
        self.arrival_us = [0] * len(graph.transfers)
        self.gradients_us = [0] * len(graph.stage_devices)

    def ready_us(self, task: Task) -> int:
        """When the last message that the task waits for has arrived."""
        return max((self.arrival_us[i] for i in task.waits), default=0)

    def on_way_us(self, task: Task) -> int:
        """When the last message that the task waits for was handed to its link."""
        return max((self.sent_us[i] for i in task.waits), default=0)

    def run(self, task: Task) -> int:
        """Run a task as soon as its device and messages allow; return its start."""
        start = max(self.free_us[task.device], self.ready_us(task))
        self.free_us[task.device] = end = start + task.length_us
        for i, offset_us in task.sends:
            transfer, sent = self.graph.transfers[i], start + offset_us
            self.sent_us[i] = sent
            if transfer.edge is None:
                self.arrival_us[i] = sent
                continue
            off_wire = max(sent, self.edge_free_us[transfer.edge]) + transfer.wire_us
            self.edge_free_us[transfer.edge] = off_wire
            self.arrival_us[i] = off_wire + transfer.latency_us
        if task.op is not None and task.op.kind in (OpKind.B, OpKind.W):
            stage = task.op.stage
            self.gradients_us[stage] = max(self.gradients_us[stage], end)
        return start

    def synced_us(self) -> list[int]:
        """Per device: when the gradients of all its stages are summed over the replicas.

        A device's reductions run one after the other, in the order in which its stages finish.
        """
        synced = [0] * self.graph.num_devices
        stages = range(len(self.graph.stage_devices))
        for stage in sorted(stages, key=lambda s: (self.gradients_us[s], s)):
            if not self.graph.sync_us[stage]:
                continue
            devices = self.graph.stage_devices[stage]
            start = max(self.gradients_us[stage], *(synced[d] for d in devices))
            for d in devices:
                synced[d] = start + self.graph.sync_us[stage]
        return synced

    def device_end_us(self) -> tuple[int, ...]:
        """Per device: end of its optimizer step, if nothing else runs on it."""
        return tuple(
            max(free, synced) + optimizer
            for free, synced, optimizer in zip(
                self.free_us, self.synced_us(), self.graph.optimizer_us, strict=True
            )
        )

    def end_us(self) -> int:
        """End of the iteration: all devices end together, then comes the overhead."""
        return max(self.device_end_us()) + self.graph.overhead_us

"""What all passes of a lowering share: the plan's structure, and who has which rows of what.

A stage on several devices splits each micro-batch's rows among them in device order, by the
stage's shares; a message carries the rows that its sender has and its receiver needs.
"""

from dataclasses import dataclass
from functools import cached_property

from lightning_dpipe.core.crossings import Crossing, crossings, stage_of_layer, stage_reads
from lightning_dpipe.core.graph import ModelGraph, Value
from lightning_dpipe.core.op import FORWARDS, Op
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.program import BufferSpec, Channel, Lane, Message, StepShape, When
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.lowering.rows import BatchLayout

Rows = tuple[int, int]
"""Half-open range of rows of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """One group's lowering for one shape class; `next_graph` is the next batch's, if another."""

    plan: Plan
    schedule: Schedule
    graph: ModelGraph
    shape: StepShape
    ranks: tuple[int, ...]
    layout: BatchLayout
    next_graph: ModelGraph | None = None

    @cached_property
    def _shares(self) -> dict[tuple[int, tuple[int, ...]], tuple[Rows, ...]]:
        return {}

    @cached_property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """The ops each device runs: all in training, else the forwards."""
        if self.shape.training:
            return self.schedule.orders
        return tuple(
            tuple(op for op in order if op.kind in FORWARDS) for order in self.schedule.orders
        )

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Values that leave their stage."""
        return crossings(self.graph, self.plan.stages)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Values each stage reads from outside itself."""
        stages = self.plan.stages
        return tuple(stage_reads(self.graph, stages, i) for i in range(len(stages)))

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """The devices that hold a stage."""
        return self.plan.stages[stage].devices

    def writer_of(self, value: int) -> int:
        """The stage that writes a graph-state value."""
        return stage_of_layer(self.plan.stages, *self.graph.writers[value])

    def readers_on(self, device: int, value: int) -> tuple[int, ...]:
        """Stages on a device that read a value."""
        return tuple(s for s in self.plan.stages_on(device) if value in self.reads[s])

    def share(self, device: int, microbatch: int) -> Rows:
        """Rows of a micro-batch that a device works on.

        Stages that share a device have the same replicas (`lower` checks), so any of them tells.
        """
        return self.shares(device, self.layout)[microbatch]

    def shares(self, device: int, layout: BatchLayout) -> tuple[Rows, ...]:
        """A device's rows of every micro-batch of a layout (of this batch or the next)."""
        if (device, layout.sizes) not in self._shares:
            stages = self.plan.stages_on(device)
            stage = self.plan.stages[stages[0]] if stages else None
            self._shares[device, layout.sizes] = tuple(
                (0, 0) if stage is None else stage.rows_on(device, layout.rows(microbatch))
                for microbatch in range(layout.num_microbatches)
            )
        return self._shares[device, layout.sizes]

    def common(self, one: int, other: int, microbatch: int) -> Rows | None:
        """Rows of a micro-batch that two devices share, None if there are none."""
        a, b = self.share(one, microbatch), self.share(other, microbatch)
        first, last = max(a[0], b[0]), min(a[1], b[1])
        return (first, last) if first < last else None

    def message(self, source: int, target: int, value: int, rows: Rows, tag: str) -> Message:
        """A pipeline message that carries some rows of `value` of one micro-batch."""
        spec = self.buffer(value, rows[1] - rows[0])
        channel = self.channel(source, target, Lane.PIPELINE)
        if any(len(self.devices_of(s)) > 1 for s in self.plan.stages_on(source)):
            tag = f"{tag}@{source}"  # pieces of one micro-batch come from several replicas
        return Message(channel=channel, tag=tag, shape=spec.shape, dtype=spec.dtype)

    def channel(self, source: int, target: int, lane: Lane) -> Channel:
        """Directed edge between two devices of the group."""
        return Channel(source=self.ranks[source], target=self.ranks[target], lane=lane)

    def known(self, value: int, when: When) -> Value:
        """A value as it is in this batch or the next one."""
        graph = self.graph if when is When.THIS else self.next_graph or self.graph
        return graph.values[value]

    def buffer(self, value: int, rows: int, when: When = When.THIS) -> BufferSpec:
        """Buffer for `rows` samples of a value."""
        known = self.known(value, when)
        return BufferSpec(shape=(rows, *known.shape), dtype=known.dtype)

"""Delivery of what is encoded for the next batch: host time, and rows that come too late.

In:     a Plan and its Profile, the sizes of the next batch, and who encodes which samples.
Out:    what sending costs each host, when another device's batch fields are where they are encoded,
        and by how much rows arrive after the op of the next step that reads them would start.

Rows are sent as their fills end, on channels of their own. The next step is taken to start its ops
when this one did, so a micro-batch whose rows are not there by then delays the next step: the
iteration is that much longer. Of each fill the micro-batch of its first sample counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_dpipe.core.crossings import stage_reads
from lightning_dpipe.core.fills import MIN_CHUNK_BYTES, Run
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.simulation.clock import Clock, Task


def num_messages(rows: int, bytes_per_sample: int, num_microbatches: int) -> int:
    """Messages that carry some rows: one a micro-batch, small ones joined (`lowering.rows`)."""
    parts = max(1, min(num_microbatches, rows))
    share_bytes = max(1, rows * bytes_per_sample // parts)
    return -(-parts // max(1, -(-MIN_CHUNK_BYTES // share_bytes)))


Wire = tuple[int, int, int]
"""A message: target, time on the wire, latency."""


@dataclass(frozen=True, kw_only=True)
class Deliveries:
    """What is the same for all placements of fills. `sizes` are those of the next batch."""

    plan: Plan
    profile: Profile
    sizes: tuple[int, ...]
    _hosts: dict[tuple[int, int, int], int] = field(default_factory=dict, repr=False)
    _wires: dict[tuple[int, int, int], tuple[Wire, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def readers(self) -> Mapping[int, tuple[tuple[int, Stage], ...]]:
        """Side input -> (device, its stage) of each device whose stages read it."""
        found: dict[int, dict[int, Stage]] = {v: {} for v in self.profile.graph.side_inputs}
        for index, stage in enumerate(self.plan.stages):
            for value in stage_reads(self.profile.graph, self.plan.stages, index):
                for device in stage.devices if value in found else ():
                    found[value][device] = stage
        return {value: tuple(devices.items()) for value, devices in found.items()}

    @cached_property
    def written(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """Frozen component -> side inputs that each of its layers writes."""
        return {
            c.name: tuple(tuple(v for v in x.writes if v in self.readers) for x in c.layers)
            for c in self.profile.graph.frozen
        }

    def host_us(self, runs: Iterable[Run]) -> tuple[int, ...]:
        """Per device: what handing over fields and encoded rows costs its host."""
        spent_us = [0] * len(self.sizes)
        graph = self.profile.graph
        fields = [v for v in graph.inputs if v in self.readers]
        encoded = [v for v in self.readers if v not in graph.inputs]
        for device, size in enumerate(self.sizes):
            for value in fields:
                spent_us[device] += self._host_us(value, device, size)
        for run in runs:
            rows = run.last - run.first
            for value in encoded:
                spent_us[run.device] += self._host_us(value, run.device, rows)
            if run.owner != run.device:
                for value in self._sent_ahead(run.device):
                    spent_us[run.owner] += self._send_us(value, run.owner, run.device, rows)
        return tuple(spent_us)

    def fields_us(self, run: Run) -> int:
        """Time that the batch fields of a run of another device's samples are on their way."""
        values = self.profile.graph.values
        per_sample = sum(values[v].bytes_per_sample for v in self.profile.graph.frozen_fields)
        link = self.profile.link(run.owner, run.device)
        return link.transfer_us((run.last - run.first) * per_sample)

    def _sent_ahead(self, device: int) -> Sequence[int]:
        """Fields that a device needs to encode for another and no stage of its own reads."""
        return [
            v
            for v in self.profile.graph.frozen_fields
            if device not in dict(self.readers.get(v, ()))
        ]

    def wires(self, value: int, source: int, rows: int) -> tuple[Wire, ...]:
        """Where a device sends so many rows of a value to."""
        key = (value, source, rows)
        if key not in self._wires:
            size, found = self.profile.graph.values[value].bytes_per_sample, []
            for target, stage in self.readers[value]:
                num_bytes = stage.most_rows(target, rows) * size
                if target != source and num_bytes:
                    link = self.profile.link(source, target)
                    wire_us = link.transfer_us(num_bytes) - link.latency_us
                    found.append((target, wire_us, link.latency_us))
            self._wires[key] = tuple(found)
        return self._wires[key]

    def _host_us(self, value: int, source: int, rows: int) -> int:
        key = (value, source, rows)
        if key not in self._hosts:
            self._hosts[key] = sum(
                self._send_us(value, source, target, stage.most_rows(target, rows))
                for target, stage in self.readers[value]
                if target != source
            )
        return self._hosts[key]

    def _send_us(self, value: int, source: int, target: int, rows: int) -> int:
        if not rows:
            return 0
        link = self.profile.link(source, target)
        size = self.profile.graph.values[value].bytes_per_sample
        more = num_messages(rows, size, self.plan.num_microbatches) - 1
        return link.send_us(rows * size) + more * link.host_us


class Arrivals:
    """State of one walk: what has been sent, and when each device's micro-batches began."""

    def __init__(self, deliveries: Deliveries, runs: Iterable[Run]) -> None:
        self.of = deliveries
        runs = tuple(runs)
        self.host_us = deliveries.host_us(runs)
        self._starts: dict[tuple[int, int], int] = {}
        self._edges: dict[tuple[int, int], int] = {}
        self._arrived: list[tuple[int, int, int]] = []
        self._fields: dict[tuple[int, int], int] = {}
        for run in runs:
            if run.owner != run.device:
                key = (run.owner, run.device)
                self._fields[key] = self._fields.get(key, 0) + deliveries.fields_us(run)

    def fields_us(self, device: int, owner: int) -> int:
        """When the fields of an owner's samples have arrived at a device that encodes them."""
        return self._fields.get((owner, device), 0)

    def started(self, task: Task, at_us: int) -> None:
        """An op has started."""
        if task.op is not None and task.op.kind in (OpKind.F, OpKind.S):
            self._starts.setdefault((task.device, task.op.microbatch), at_us)

    def encoded(
        self, device: int, owner: int, values: Iterable[int], span: tuple[int, int], at_us: int
    ) -> None:
        """A device has encoded samples `span` of some values: they leave for their readers."""
        rows, size = span[1] - span[0], max(1, self.of.sizes[owner])
        microbatch = span[0] * self.of.plan.num_microbatches // size
        for value in values:
            for target, wire_us, latency_us in self.of.wires(value, device, rows):
                off_us = max(at_us, self._edges.get((device, target), 0)) + wire_us
                self._edges[device, target] = off_us
                self._arrived.append((target, microbatch, off_us + latency_us))

    def end_us(self) -> int:
        """The iteration does not end earlier: the next one's rows would come too late."""
        return max((at - self._starts.get((d, m), 0) for d, m, at in self._arrived), default=0)

    def hand_over(self, clock: Clock, device: int) -> int:
        """Let a device do its sending, after its last op and fill; return when it begins."""
        at_us = clock.free_us[device]
        clock.free_us[device] += self.host_us[device]
        return at_us

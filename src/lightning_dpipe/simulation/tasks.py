"""How long each task of a step takes and which message starts which.

In:     Plan, Schedule, Profile and StepShape.
Out:    a TaskGraph in topological order, fills apart.

A value goes straight from the stage that wrote it to each device that reads it, a gradient returns
along the readers (core/crossings). What a message costs the host is part of the op that sends it:
each message of an op is handed over when the host is through with those before it.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from lightning_dpipe.core.crossings import crossings, loss_stage, stage_reads
from lightning_dpipe.core.errors import PlanError, ScheduleError
from lightning_dpipe.core.fleet import kinds_in_groups
from lightning_dpipe.core.op import FORWARDS, Op, OpKind
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile, reduce_us
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.core.timeline import Activity, FrozenWork
from lightning_dpipe.simulation.clock import Task, TaskGraph, Transfer
from lightning_dpipe.simulation.deliveries import num_messages

ACTIVITIES = {
    OpKind.F: Activity.FORWARD,
    OpKind.S: Activity.SELF_CONDITIONING,
    OpKind.B: Activity.BACKWARD,
    OpKind.I: Activity.BACKWARD,
    OpKind.W: Activity.BACKWARD,
}


def task_graph(plan: Plan, schedule: Schedule, profile: Profile, shape: StepShape) -> TaskGraph:
    """Build the tasks and messages of one step, fills apart.

    Raises:
        PlanError: The shape does not fit the plan.
        ScheduleError: The ops wait for each other in a circle, or one cannot be simulated.
    """
    return _Builder(plan, schedule, profile, shape).build()


def step_orders(schedule: Schedule, shape: StepShape) -> tuple[tuple[Op, ...], ...]:
    """The ops each device runs: all in training, else the forwards."""
    if shape.training:
        return schedule.orders
    return tuple(tuple(op for op in order if op.kind in FORWARDS) for order in schedule.orders)


class _Builder:
    def __init__(self, plan: Plan, schedule: Schedule, profile: Profile, shape: StepShape) -> None:
        if len(shape.sizes) != plan.num_devices or sum(shape.sizes) < plan.num_microbatches:
            raise PlanError(
                f"{len(shape.sizes)} local batches with {sum(shape.sizes)} samples do not fit a "
                f"plan of {plan.num_devices} devices and {plan.num_microbatches} micro-batches; "
                "give one size per device and at least one sample per micro-batch"
            )
        self.plan, self.profile, self.shape = plan, profile, shape
        self.kinds = kinds_in_groups(plan, profile)
        self.orders = step_orders(schedule, shape)
        self.graph = profile.graph
        self.rows = split_sizes(sum(shape.sizes), plan.num_microbatches)
        self.transfers: list[Transfer] = []
        self.producers: list[str] = []
        self.host_us: list[int] = []
        self.traffic: dict[tuple[int, int], int] = {}
        self.edges: dict[tuple[int, int, str], int] = {}
        self.waits: dict[tuple[Op, int], list[int]] = {}
        self.lengths: dict[tuple[int, int, OpKind, int], int] = {}
        self.ranges: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.crossings = crossings(self.graph, plan.stages)

    def build(self) -> TaskGraph:
        plan = self.plan
        first_ops = [order[0] if order else None for order in self.orders]
        queues = [self._prologue(d, first_ops) for d in range(plan.num_devices)]
        # Every op's sends are known before any op's waits are complete: two passes.
        sends = [[self._sends(op, d) for op in order] for d, order in enumerate(self.orders)]
        for d, queue in enumerate(queues):
            ops = zip(self.orders[d], sends[d], strict=True)
            queue += [self._task(op, d, sent) for op, sent in ops]
        updates = self.shape.training and self.shape.reduce
        return TaskGraph(
            num_devices=plan.num_devices,
            num_edges=len(self.edges),
            tasks=self._sorted(queues),
            transfers=tuple(self.transfers),
            stage_devices=tuple(stage.devices for stage in plan.stages),
            sync_us=tuple(self._sync_us(s) if updates else 0 for s in range(len(plan.stages))),
            optimizer_us=tuple(
                sum(
                    self._profile(d).optimizer_us(stage.backbone, stage.start, stage.stop)
                    for stage in map(plan.stages.__getitem__, plan.stages_on(d))
                )
                if updates
                else 0
                for d in range(plan.num_devices)
            ),
            overhead_us=self.profile.overhead_us,
            traffic=self.traffic,
        )

    def _profile(self, device: int) -> Profile:
        """Costs of a device's own kind."""
        return self.profile.of_kind(self.kinds[device])

    def _row_range(self, stage: int, device: int, microbatch: int) -> tuple[int, int]:
        """Rows of a micro-batch that a replica of a stage works on."""
        key = (stage, device, self.rows[microbatch])
        if key not in self.ranges:
            self.ranges[key] = self.plan.stages[stage].rows_on(device, self.rows[microbatch])
        return self.ranges[key]

    # ---- ops

    def _task(self, op: Op, device: int, sends: list[int]) -> Task:
        if op.kind not in ACTIVITIES:
            raise ScheduleError(
                f"op {op} on device {device} is frozen work inside the schedule; "
                "frozen work is placed by the plan's fills"
            )
        first, last = self._row_range(op.stage, device, op.microbatch)
        end_us = self._length_us(op, device, last - first)
        handed_over = []
        for i in sends:
            end_us += self.host_us[i]
            handed_over.append((i, end_us))
        return Task(
            device=device,
            op=op,
            activity=ACTIVITIES[op.kind],
            label=str(op),
            length_us=end_us,
            waits=tuple(self.waits.get((op, device), ())),
            sends=tuple(handed_over),
        )

    def _length_us(self, op: Op, device: int, rows: int) -> int:
        key = (self.kinds[device], op.stage, op.kind, rows)
        if key not in self.lengths:
            stage, profile = self.plan.stages[op.stage], self._profile(device)
            span = (stage.backbone, stage.start, stage.stop, rows)
            again = profile.forward_us(*span) if stage.recompute else 0
            if op.kind in (OpKind.F, OpKind.S):
                self.lengths[key] = profile.forward_us(*span)
            elif op.kind is OpKind.B:
                self.lengths[key] = again + profile.backward_us(*span)
            elif op.kind is OpKind.I:
                self.lengths[key] = again + profile.input_grad_us(*span)
            else:
                self.lengths[key] = profile.backward_us(*span) - profile.input_grad_us(*span)
        return self.lengths[key]

    def _sync_us(self, stage: int) -> int:
        """Ring all-reduce of a stage's gradients over all its replicas, leg after leg."""
        s = self.plan.stages[stage]
        num_bytes = self.profile.trained_bytes(s.backbone, s.start, s.stop)
        replicas = len(self.plan.groups) * len(s.devices)
        return reduce_us(num_bytes, self.profile.legs(replicas, stage))

    # ---- messages

    def _sends(self, op: Op, device: int) -> list[int]:
        """Messages that an op sends, in order; notes them as waits of their readers."""
        if op.kind in (OpKind.F, OpKind.S):
            return self._forward_sends(op, device)
        return self._gradient_sends(op, device) if op.kind in (OpKind.B, OpKind.I) else []

    def _forward_sends(self, op: Op, device: int) -> list[int]:
        sent = []
        for crossing in self.crossings:
            if crossing.writer == op.stage:
                sent += self._to_readers(op, device, crossing.value, crossing.readers, op.kind)
        node, stages = self.graph.feedback, self.plan.stages
        if op.kind is OpKind.S and node is not None:
            backbone = stages[op.stage].backbone
            if backbone == node.backbone and loss_stage(self.graph, stages, backbone) == op.stage:
                readers = [
                    s
                    for s in range(len(stages))
                    if node.writes in stage_reads(self.graph, stages, s)
                ]
                sent += self._to_readers(op, device, node.writes, readers, OpKind.F)
        return sent

    def _to_readers(
        self, op: Op, device: int, value: int, readers: Iterable[int], kind: OpKind
    ) -> list[int]:
        """A value goes once to each device that reads it, however many of its stages do."""
        by_device: dict[int, list[Op]] = {}
        for stage in readers:
            for target in self.plan.stages[stage].devices:
                by_device.setdefault(target, []).append(Op(stage, kind, op.microbatch))
        return [
            i
            for target, ops in by_device.items()
            for i in self._message(op, device, value, target, ops)
        ]

    def _gradient_sends(self, op: Op, device: int) -> list[int]:
        return [
            i
            for crossing in self.crossings
            if self.graph.values[crossing.value].requires_grad
            for source, target in crossing.gradient_hops
            if source == op.stage
            for to in self.plan.stages[target].devices
            for i in self._message(
                op,
                device,
                crossing.value,
                to,
                [Op(target, k, op.microbatch) for k in (OpKind.B, OpKind.I)],
            )
        ]

    def _message(
        self, op: Op, device: int, value: int, target: int, readers: Sequence[Op]
    ) -> list[int]:
        """The rows of `value` that this replica has and the target needs: one transfer, or none."""
        first, last = self._row_range(op.stage, device, op.microbatch)
        rows = 0
        for reader in readers:
            low, high = self._row_range(reader.stage, target, op.microbatch)
            rows = max(rows, min(last, high) - max(first, low))
        if rows <= 0:
            return []
        num_bytes = rows * self.graph.values[value].bytes_per_sample
        i = self._transfer(device, target, "pipeline", num_bytes, str(op))
        for reader in readers:
            self.waits.setdefault((reader, target), []).append(i)
        return [i]

    def _transfer(self, source: int, target: int, lane: str, num_bytes: int, producer: str) -> int:
        link = self.profile.link(source, target)
        local = source == target
        if not local:
            self.traffic[source, target] = self.traffic.get((source, target), 0) + num_bytes
        edge = None if local else self.edges.setdefault((source, target, lane), len(self.edges))
        wire_us = 0 if local else max(0, link.transfer_us(num_bytes) - link.latency_us)
        self.transfers.append(
            Transfer(edge=edge, wire_us=wire_us, latency_us=0 if local else link.latency_us)
        )
        self.producers.append(producer)
        self.host_us.append(0 if local else link.send_us(num_bytes))
        return len(self.transfers) - 1

    # ---- a batch that was not encoded ahead

    def _prologue(self, device: int, first_ops: Sequence[Op | None]) -> list[Task]:
        """Deliver the batch's fields, encode the whole local batch, deliver what was encoded."""
        rows = self.shape.sizes[device]
        if self.shape.encoded or not rows:
            return []
        fields = frozenset(self.graph.inputs)
        encoded = frozenset(self.graph.side_inputs) - fields
        tasks = self._deliveries(device, first_ops, fields)
        tasks += [
            Task(
                device=device,
                op=None,
                activity=Activity.FROZEN,
                label=str(
                    FrozenWork(component=c.name, start=0, stop=len(c.layers), first=0, last=rows)
                ),
                length_us=self._profile(device).fill_us
                + self._profile(device).forward_us(c.name, 0, len(c.layers), rows),
            )
            for c in self.graph.frozen
        ]
        return tasks + self._deliveries(device, first_ops, encoded)

    def _deliveries(
        self, device: int, first_ops: Sequence[Op | None], values: frozenset[int]
    ) -> list[Task]:
        """Send each value to each other device whose stages read it; their first op waits."""
        sent = []
        for target, op in enumerate(first_ops):
            if target == device or op is None:
                continue
            rows: dict[int, int] = {}
            for s in self.plan.stages_on(target):
                share = self.plan.stages[s].most_rows(target, self.shape.sizes[device])
                for value in stage_reads(self.graph, self.plan.stages, s):
                    if value in values and value in self.graph.side_inputs:
                        rows[value] = max(rows.get(value, 0), share)
            for value, n in rows.items():
                num_bytes = n * self.graph.values[value].bytes_per_sample
                sent.append(self._transfer(device, target, "rows", num_bytes, f"device {device}"))
                size = self.graph.values[value].bytes_per_sample
                more = num_messages(n, size, self.plan.num_microbatches) - 1
                self.host_us[sent[-1]] += more * self.profile.link(device, target).host_us
                self.waits.setdefault((op, target), []).append(sent[-1])
        if not sent:
            return []
        sent_us = list(accumulate(self.host_us[i] for i in sent))
        task = Task(
            device=device,
            op=None,
            activity=Activity.HOST,
            label="send rows",
            length_us=sent_us[-1],
            sends=tuple(zip(sent, sent_us, strict=True)),
        )
        return [task]

    # ---- order

    def _sorted(self, queues: Sequence[Sequence[Task]]) -> tuple[Task, ...]:
        """Producers before consumers, each device's tasks in its own order."""
        at, done, order = [0] * len(queues), set[int](), list[Task]()
        moved = True
        while moved:
            moved = False
            for d, queue in enumerate(queues):
                while at[d] < len(queue) and done.issuperset(queue[at[d]].waits):
                    order.append(queue[at[d]])
                    done.update(i for i, _ in queue[at[d]].sends)
                    at[d] += 1
                    moved = True
        for d, queue in enumerate(queues):
            if at[d] < len(queue):
                task = queue[at[d]]
                missing = next(i for i in task.waits if i not in done)
                raise ScheduleError(
                    f"device {d} waits for ever: op {task.label} at position {at[d]} of "
                    f"{len(queue)} needs a message of {self.producers[missing]}, which cannot run "
                    "before it; change the order of the schedule"
                )
        return tuple(order)

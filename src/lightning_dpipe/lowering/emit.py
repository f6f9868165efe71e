"""First pass: walk one device's ops and write down what each needs, does and sends.

Receives are only noted here (`Need`): their place and order depend on the sender's program, which
`receive` knows once every device has been emitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_dpipe.core.crossings import Crossing, crossings, loss_stage, stage_reads
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.program import (
    Backward,
    BufferSpec,
    Channel,
    Forward,
    Gather,
    Instruction,
    Lane,
    Message,
    Reduce,
    Send,
    StepShape,
    WaitRecv,
    Zeros,
)
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.lowering.encode import EncodeEmitter
from lightning_dpipe.lowering.rows import BatchLayout


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """Everything the passes share."""

    plan: Plan
    schedule: Schedule
    graph: ModelGraph
    shape: StepShape
    ranks: tuple[int, ...]
    layout: BatchLayout

    @cached_property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """The ops each device runs: all in training, else the forwards."""
        if self.shape.training:
            return self.schedule.orders
        return tuple(
            tuple(op for op in order if op.kind is OpKind.F) for order in self.schedule.orders
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

    def device_of(self, stage: int) -> int:
        """The device a stage lives on."""
        return self.plan.stages[stage].devices[0]

    def channel(self, source: int, target: int, lane: Lane) -> Channel:
        """Directed edge between two devices of the group."""
        return Channel(source=self.ranks[source], target=self.ranks[target], lane=lane)

    def message(self, source: int, target: int, value: int, microbatch: int, tag: str) -> Message:
        """A pipeline message that carries `value` of one micro-batch."""
        spec = self.buffer(value, self.layout.rows(microbatch))
        channel = self.channel(source, target, Lane.PIPELINE)
        return Message(channel=channel, tag=tag, shape=spec.shape, dtype=spec.dtype)

    def buffer(self, value: int, rows: int) -> BufferSpec:
        """Buffer for `rows` samples of a value."""
        known = self.graph.values[value]
        return BufferSpec(shape=(rows, *known.shape), dtype=known.dtype)

    def readers_on(self, device: int, value: int) -> tuple[int, ...]:
        """Stages on a device that read a value."""
        return tuple(s for s in self.plan.stages_on(device) if value in self.reads[s])

    def needs_rows(self, device: int, value: int) -> bool:
        """Whether any stage on a device reads a side input."""
        return bool(self.readers_on(device, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """`slot` is to be received as `message` before step `step` runs."""

    message: Message
    slot: int
    step: int


@dataclass(slots=True)
class Step:
    """Instructions around one op, in order. `op` None: the prologue."""

    op: Op | None
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Emitted:
    """One device's program before receives, frees and buffers.

    `holds` maps a Backward's position in the step to slots that its autograd graph still reads.
    """

    steps: list[Step]
    needs: list[Need]
    specs: dict[int, BufferSpec]
    num_slots: int
    holds: dict[Op, tuple[int, ...]]
    pinned: frozenset[int]


class DeviceEmitter:
    """Emits one device's steps. Slots are keyed by what they hold, so nothing arrives twice."""

    def __init__(self, lowering: Lowering, device: int) -> None:
        self.low = lowering
        self.device = device
        self.slots: dict[tuple[object, ...], int] = {}
        self.specs: dict[int, BufferSpec] = {}
        self.needs: list[Need] = []
        self.holds: dict[Op, tuple[int, ...]] = {}
        self.pinned: set[int] = set()
        self.steps: list[Step] = []

    def emit(self) -> Emitted:
        """Walk the schedule's order, with the encoder work around it."""
        low = self.low
        encode = EncodeEmitter(low, self.device)
        self.steps.append(Step(None, encode.prologue()))
        order = low.orders[self.device]
        last_backward = {op.stage: op for op in order if op.kind is OpKind.B}
        for num_before, op in enumerate(order):
            step = Step(op)
            self.steps.append(step)
            step.instructions += self._op(op)
            if last_backward.get(op.stage) == op and low.shape.reduce and len(low.plan.groups) > 1:
                step.instructions.append(Reduce(stage=op.stage))
            step.instructions += encode.after(num_before + 1)
        return Emitted(
            steps=self.steps,
            needs=self.needs,
            specs=self.specs,
            num_slots=len(self.slots),
            holds=self.holds,
            pinned=frozenset(self.pinned),
        )

    def _op(self, op: Op) -> list[Instruction]:
        if op.kind is OpKind.B:
            return self._backward(op)
        return self._forward(op)

    def _slot(self, *key: object) -> int:
        return self.slots.setdefault(key, len(self.slots))

    # ---- forward and self-conditioning sweep

    def _forward(self, op: Op) -> list[Instruction]:
        low, m = self.low, op.microbatch
        before: list[Instruction] = []
        reads = tuple((value, self._read(op, value, before)) for value in low.reads[op.stage])
        leaving = [c for c in low.crossings if c.writer == op.stage]
        writes = tuple((c.value, self._slot(op.kind, c.value, m)) for c in leaving)
        stage = low.plan.stages[op.stage]
        is_last = loss_stage(low.graph, low.plan.stages, stage.backbone) == op.stage
        feedback = self._feedback_slot(op, stage) if is_last else None
        training = op.kind is OpKind.F and low.shape.training
        if training:
            self.holds[Op(op.stage, OpKind.B, m)] = tuple(slot for _, slot in reads)
        work = Forward(
            op=op,
            reads=reads,
            writes=writes,
            training=training,
            loss=is_last and op.kind is OpKind.F,
            feedback=feedback,
            first_row=low.layout.bounds[m],
            rows=low.layout.rows(m),
        )
        after: list[Instruction] = []
        for crossing, (_, slot) in zip(leaving, writes, strict=True):
            self._send_to_readers(op.kind, crossing.value, crossing.readers, m, slot, after)
        if feedback is not None and low.graph.feedback is not None:
            value = low.graph.feedback.writes
            readers = tuple(s for d in range(len(low.ranks)) for s in low.readers_on(d, value))
            self._send_to_readers("feedback", value, readers, m, feedback, after)
        return [*before, work, *after]

    def _feedback_slot(self, op: Op, stage: Stage) -> int | None:
        node = self.low.graph.feedback
        if op.kind is not OpKind.S or node is None or node.backbone != stage.backbone:
            return None
        return self._slot("feedback", node.writes, op.microbatch)

    def _send_to_readers(
        self,
        kind: object,
        value: int,
        readers: Sequence[int],
        microbatch: int,
        slot: int,
        out: list[Instruction],
    ) -> None:
        targets = dict.fromkeys(self.low.device_of(stage) for stage in readers)
        for target in targets:
            if target != self.device:
                tag = _tag(kind, value, microbatch)
                message = self.low.message(self.device, target, value, microbatch, tag)
                out.append(Send(message=message, slot=slot))

    def _read(self, op: Op, value: int, out: list[Instruction]) -> int:
        graph = self.low.graph
        if value in graph.graph_state:
            component, layer = graph.writers[value]
            writer = next(
                i
                for i, s in enumerate(self.low.plan.stages)
                if s.backbone == component and s.start <= layer < s.stop
            )
            return self._arrive(op.kind, value, op.microbatch, self.low.device_of(writer), out)
        if graph.feedback is not None and value == graph.feedback.writes:
            shape = self.low.shape
            if op.kind is OpKind.F and shape.self_conditioned and shape.training:
                last = loss_stage(graph, self.low.plan.stages, graph.feedback.backbone)
                source = self.low.device_of(last)
                return self._arrive("feedback", value, op.microbatch, source, out)
            return self._zeros(value, op.microbatch, out)
        return self._gather(value, op.microbatch, out)

    def _arrive(
        self, kind: object, value: int, microbatch: int, source: int, out: list[Instruction]
    ) -> int:
        """The slot of a value from `source`; the first reader on a device waits for it."""
        known = (kind, value, microbatch) in self.slots
        slot = self._slot(kind, value, microbatch)
        if source != self.device and not known:
            tag = _tag(kind, value, microbatch)
            message = self.low.message(source, self.device, value, microbatch, tag)
            self._need(message, slot, out)
        return slot

    def _need(self, message: Message, slot: int, out: list[Instruction]) -> None:
        self.needs.append(Need(message=message, slot=slot, step=len(self.steps) - 1))
        self.specs[slot] = BufferSpec(shape=message.shape, dtype=message.dtype)
        out.append(WaitRecv(slot=slot, tag=message.tag))

    def _zeros(self, value: int, microbatch: int, out: list[Instruction]) -> int:
        rows = self.low.layout.rows(microbatch)
        known = ("zeros", value, rows) in self.slots
        slot = self._slot("zeros", value, rows)
        if not known:
            self.pinned.add(slot)  # shared by all micro-batches of this size
            self.specs[slot] = self.low.buffer(value, rows)
            out.append(Zeros(slot=slot, buffer=-1))
        return slot

    def _gather(self, value: int, microbatch: int, out: list[Instruction]) -> int:
        known = ("rows", value, microbatch) in self.slots
        slot = self._slot("rows", value, microbatch)
        if not known:
            parts = self.low.layout.parts(microbatch)
            if len(parts) > 1:
                self.specs[slot] = self.low.buffer(value, self.low.layout.rows(microbatch))
            buffer = -1 if len(parts) > 1 else None
            out.append(Gather(value=value, slot=slot, parts=parts, buffer=buffer))
        return slot

    # ---- backward

    def _backward(self, op: Op) -> list[Instruction]:
        low, m = self.low, op.microbatch
        before: list[Instruction] = []
        after: list[Instruction] = []
        grads: list[tuple[int, int]] = []
        returns: list[tuple[int, int]] = []
        for crossing in low.crossings:
            if not low.graph.values[crossing.value].requires_grad:
                continue
            for source, target in crossing.gradient_hops:
                tag = f"{crossing.value}:{m}:grad{source}>{target}"
                if target == op.stage:
                    grads.append(
                        (crossing.value, self._grad_in(source, crossing.value, m, tag, before))
                    )
                if source == op.stage:
                    slot = self._slot("grad", crossing.value, m, source)
                    returns.append((crossing.value, slot))
                    to = low.device_of(target)
                    if to != self.device:
                        message = low.message(self.device, to, crossing.value, m, tag)
                        after.append(Send(message=message, slot=slot))
        work = Backward(op=op, grads=tuple(grads), returns=tuple(returns))
        return [*before, work, *after]

    def _grad_in(
        self, source: int, value: int, microbatch: int, tag: str, out: list[Instruction]
    ) -> int:
        slot = self._slot("grad", value, microbatch, source)
        at = self.low.device_of(source)
        if at != self.device:
            self._need(self.low.message(at, self.device, value, microbatch, tag), slot, out)
        return slot


def _tag(kind: object, value: int, microbatch: int) -> str:
    name = kind.value if isinstance(kind, OpKind) else str(kind)
    return f"{value}:{microbatch}:{name}"

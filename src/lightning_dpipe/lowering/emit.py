"""First pass: walk one device's ops and write down what each needs, does and sends.

Receives are only noted here (`Need`): their place and order depend on the sender's program, which
`receive` knows once every device has been emitted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_dpipe.core.crossings import loss_stage
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Stage
from lightning_dpipe.core.program import (
    Backward,
    BufferSpec,
    Forward,
    Gather,
    Instruction,
    Message,
    Reduce,
    Send,
    WaitRecv,
    Zeros,
)
from lightning_dpipe.lowering.context import Lowering
from lightning_dpipe.lowering.encode import EncodeEmitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Rows ``[first, last)`` of `slot` are to be received as `message` before step `step` runs."""

    message: Message
    slot: int
    step: int
    first: int
    last: int


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
            if last_backward.get(op.stage) == op and self._reduces(op.stage):
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

    def _reduces(self, stage: int) -> bool:
        replicas = len(self.low.plan.groups) * len(self.low.devices_of(stage))
        return self.low.shape.reduce and replicas > 1

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
        first, last = low.share(self.device, m)
        work = Forward(
            op=op,
            reads=reads,
            writes=writes,
            training=training,
            loss=is_last and op.kind is OpKind.F,
            feedback=feedback,
            first_row=low.layout.bounds[m] + first,
            rows=last - first,
        )
        after: list[Instruction] = []
        for crossing, (_, slot) in zip(leaving, writes, strict=True):
            targets = dict.fromkeys(d for s in crossing.readers for d in low.devices_of(s))
            after += self._sends(targets, crossing.value, m, slot, _tag(op.kind, crossing.value, m))
        if feedback is not None and low.graph.feedback is not None:
            value = low.graph.feedback.writes
            targets = dict.fromkeys(d for d in range(len(low.ranks)) if low.readers_on(d, value))
            after += self._sends(targets, value, m, feedback, _tag("feedback", value, m))
        return [*before, work, *after]

    def _feedback_slot(self, op: Op, stage: Stage) -> int | None:
        node = self.low.graph.feedback
        if op.kind is not OpKind.S or node is None or node.backbone != stage.backbone:
            return None
        return self._slot("feedback", node.writes, op.microbatch)

    def _sends(
        self, targets: Iterable[int], value: int, microbatch: int, slot: int, tag: str
    ) -> list[Instruction]:
        """Send to each other device the rows it shares with this one."""
        low, out = self.low, list[Instruction]()
        start, _ = low.share(self.device, microbatch)
        for target in targets:
            rows = low.common(self.device, target, microbatch)
            if target != self.device and rows is not None:
                message = low.message(self.device, target, value, rows, tag)
                first, last = rows[0] - start, rows[1] - start
                out.append(Send(message=message, slot=slot, first=first, last=last))
        return out

    def _read(self, op: Op, value: int, out: list[Instruction]) -> int:
        low, graph, m = self.low, self.low.graph, op.microbatch
        if value in graph.graph_state:
            sources = low.devices_of(low.writer_of(value))
            return self._arrive((op.kind, value, m), value, m, sources, out)
        if graph.feedback is not None and value == graph.feedback.writes:
            if op.kind is OpKind.F and low.shape.self_conditioned:
                last = loss_stage(graph, low.plan.stages, graph.feedback.backbone)
                return self._arrive(("feedback", value, m), value, m, low.devices_of(last), out)
            return self._zeros(value, m, out)
        return self._gather(value, m, out)

    def _arrive(
        self,
        key: tuple[object, ...],
        value: int,
        microbatch: int,
        sources: Iterable[int],
        out: list[Instruction],
        tag: str | None = None,
    ) -> int:
        """The slot under `key`; the first one on a device to ask for it receives its pieces."""
        low, known = self.low, key in self.slots
        slot = self._slot(*key)
        start, stop = low.share(self.device, microbatch)
        if known or self.device in sources:
            return slot
        self.specs[slot] = low.buffer(value, stop - start)
        for source in sources:
            rows = low.common(source, self.device, microbatch)
            if rows is not None:
                name = tag or _tag(key[0], value, microbatch)
                message = low.message(source, self.device, value, rows, name)
                self.needs.append(
                    Need(
                        message=message,
                        slot=slot,
                        step=len(self.steps) - 1,
                        first=rows[0] - start,
                        last=rows[1] - start,
                    )
                )
                out.append(WaitRecv(slot=slot, tag=message.tag))
        return slot

    def _zeros(self, value: int, microbatch: int, out: list[Instruction]) -> int:
        first, last = self.low.share(self.device, microbatch)
        rows = last - first
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
            rows = self.low.share(self.device, microbatch)
            parts = self.low.layout.parts(microbatch, rows)
            if len(parts) > 1:
                self.specs[slot] = self.low.buffer(value, rows[1] - rows[0])
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
            value = crossing.value
            for source, target in crossing.gradient_hops:
                tag = f"{value}:{m}:grad{source}>{target}"
                key = ("grad", value, m, source)
                if target == op.stage:
                    slot = self._arrive(key, value, m, low.devices_of(source), before, tag)
                    grads.append((value, slot))
                if source == op.stage:
                    slot = self._slot(*key)
                    returns.append((value, slot))
                    after += self._sends(low.devices_of(target), value, m, slot, tag)
        work = Backward(op=op, grads=tuple(grads), returns=tuple(returns))
        return [*before, work, *after]


def _tag(kind: object, value: int, microbatch: int) -> str:
    name = kind.value if isinstance(kind, OpKind) else str(kind)
    return f"{value}:{microbatch}:{name}"

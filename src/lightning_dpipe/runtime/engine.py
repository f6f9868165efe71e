"""The engine: walk one rank's program. It knows no schedule, no rank and no model.

Sends are started and never waited for before the step ends; receives were posted ahead by the
program. Nothing here synchronises the host with a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.program import (
    Backward,
    Encode,
    Forward,
    Free,
    Gather,
    Instruction,
    PostRecv,
    PostRows,
    Program,
    Reduce,
    Send,
    SendRows,
    WaitRecv,
    When,
    Zeros,
)
from lightning_dpipe.core.timeline import Activity, FrozenWork
from lightning_dpipe.runtime.encodings import Encodings
from lightning_dpipe.runtime.frozen import FrozenRunner
from lightning_dpipe.runtime.pool import BufferPool
from lightning_dpipe.runtime.reduce import Reducer
from lightning_dpipe.runtime.stage import DrawContext, Saved, StageRunner
from lightning_dpipe.runtime.trace import ACTIVITY, StepTrace, Tracer
from lightning_dpipe.runtime.transport import Handle, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What changes from step to step.

    `loss_scale` is the gradient of the reported loss with respect to one sample's loss, i.e.
    1 / (samples of the global batch x accumulation). `dropout` False is evaluation mode.
    """

    this: Encodings
    next: Encodings | None
    loss_scale: float
    batch_index: int
    dropout: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step leaves beside gradients.

    `loss_sum[backbone]`: detached sum of the per-sample losses this rank computed; absent where it
    holds no loss stage.
    """

    loss_sum: Mapping[str, Tensor]
    trace: StepTrace | None


@dataclass(slots=True)
class _Running:
    """State of one step."""

    program: Program
    inputs: StepInputs
    slots: list[Tensor | None]
    buffers: tuple[Tensor, ...]
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    arriving: dict[tuple[int, str], tuple[Handle, int]] = field(default_factory=dict)
    sending: list[Handle] = field(default_factory=list)
    losses: dict[str, Tensor] = field(default_factory=dict)

    def get(self, slot: int) -> Tensor:
        tensor = self.slots[slot]
        assert tensor is not None, f"slot {slot} is empty"
        return tensor

    def bank(self, when: When) -> Encodings:
        bank = self.inputs.this if when is When.THIS else self.inputs.next
        assert bank is not None
        return bank


class Engine:
    """Runs programs on one device."""

    def __init__(
        self,
        *,
        stages: Mapping[int, StageRunner],
        backbones: Mapping[int, str],
        frozen: FrozenRunner,
        transport: Transport,
        device: torch.device,
        group: int,
        seed: int,
        reducer: Reducer | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._stages = stages
        self._backbones = backbones
        self._frozen = frozen
        self._transport = transport
        self._device = device
        self._group = group
        self._seed = seed
        self._reducer = reducer
        self.tracer = tracer
        self.position = ""
        self.buffers = BufferPool(device)
        cuda = device.type == "cuda"
        self._aside = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._scales: dict[tuple[int, float], Tensor] = {}

    def run(self, program: Program, inputs: StepInputs) -> StepResult:
        """Run one step. Gradients accumulate into the stages' parameters.

        Raises:
            RankError: Another rank failed.
            Exception: Whatever a layer raised, with a note that names the instruction.
        """
        state = _Running(
            program=program,
            inputs=inputs,
            slots=[None] * program.num_slots,
            buffers=self.buffers.of(program),
        )
        if self.tracer is not None:
            self.tracer.begin()
        instruction = program.instructions[0]
        try:
            for instruction in program.instructions:
                self._execute(instruction, state)
        except Exception as error:
            self.position = describe(instruction)
            if not isinstance(error, DPipeError) and hasattr(error, "add_note"):
                error.add_note(f"rank {program.rank}, device {program.device}: {self.position}")
            raise
        for handle in state.sending:
            handle.wait()
        return StepResult(
            loss_sum=state.losses, trace=self.tracer.finish() if self.tracer is not None else None
        )

    def _execute(self, instruction: Instruction, state: _Running) -> None:
        match instruction:
            case Forward():
                self._forward(instruction, state)
            case Backward():
                self._backward(instruction, state)
            case WaitRecv(slot=slot, tag=tag):
                handle, source = state.arriving.pop((slot, tag))
                self._wait(handle, source, tag)
            case PostRecv(message=message, slot=slot, buffer=buffer, first=first, last=last):
                tensor = state.slots[slot] = state.buffers[buffer]
                handle = self._transport.post(message, tensor[first:last])
                state.arriving[slot, message.tag] = (handle, message.channel.source)
            case Send(message=message, slot=slot, first=first, last=last):
                rows = state.get(slot)[first:last].contiguous()
                state.sending.append(self._transport.send(message, rows))
                if self.tracer is not None:
                    self.tracer.sent(message.channel.target, message.tag)
            case Free(slots=slots):
                for slot in slots:
                    state.slots[slot] = None
            case Gather():
                self._gather(instruction, state)
            case Encode():
                self._encode(instruction, state)
            case PostRows(message=message, value=value, device=device, first=first, last=last):
                bank = state.bank(instruction.when)
                buffer_rows = bank.landing(value, device, first, last)
                handle = self._transport.post(message, buffer_rows)
                bank.expect(value, device, first, last, handle, message)
            case SendRows(message=message, value=value, first=first, last=last):
                bank = state.bank(instruction.when)
                home = bank.position if instruction.owner is None else instruction.owner
                # Draw keys are on the host, and not every transport sends from there.
                rows = bank.read(value, home, first, last).to(self._device)
                state.sending.append(self._transport.send(message, rows))
                if self.tracer is not None:
                    self.tracer.sent(message.channel.target, message.tag)
            case Zeros(slot=slot, buffer=buffer):
                state.slots[slot] = state.buffers[buffer].zero_()
            case Reduce(stage=stage):
                if self._reducer is not None:
                    self._reducer.start(self._stages[stage].parameters)

    def _forward(self, work: Forward, state: _Running) -> None:
        start = self.tracer.mark() if self.tracer is not None else 0
        op, stage = work.op, self._stages[work.op.stage]
        inputs = {value: state.get(slot) for value, slot in work.reads}
        saved = Saved()
        if work.training:
            draws = self._draws(work.first_row, state) if state.inputs.dropout else None
            env = stage.forward(inputs, saved, draws)
        else:
            with torch.no_grad():
                env = stage.run(inputs, None)
                if work.feedback is not None:
                    assert stage.feedback is not None
                    node = stage.feedback
                    state.slots[work.feedback] = node.fn(*[env[v] for v in node.reads])
            if torch.is_autocast_enabled(self._device.type):
                # Autocast caches low-precision weights, also those cast without gradient: training
                # ops after this one would find them and train nothing.
                torch.clear_autocast_cache()
        for value, slot in work.writes:
            if work.training:
                saved.roots[value] = env[value]
                state.slots[slot] = env[value].detach()
            else:
                state.slots[slot] = _apart(env[value], inputs)
        if work.loss:
            assert stage.loss is not None
            with torch.set_grad_enabled(work.training):
                loss = stage.loss.fn(*[env[v] for v in stage.loss.reads])
            if work.training:
                saved.loss = loss
            backbone = self._backbones[op.stage]
            total = loss.detach().sum()
            before = state.losses.get(backbone)
            state.losses[backbone] = total if before is None else before + total
        if work.training:
            state.saved[(op.stage, op.microbatch)] = saved
        if self.tracer is not None:
            self.tracer.work(start, ACTIVITY[op.kind], str(op), op)

    def _backward(self, work: Backward, state: _Running) -> None:
        start = self.tracer.mark() if self.tracer is not None else 0
        saved = state.saved.pop((work.op.stage, work.op.microbatch))
        scale = None
        if saved.loss is not None:
            scale = self._scale(saved.loss, state.inputs.loss_scale)
        grads = {value: state.get(slot) for value, slot in work.grads}
        wanted = [value for value, _ in work.returns]
        found = self._stages[work.op.stage].backward(saved, grads, scale, wanted)
        for (_, slot), grad in zip(work.returns, found, strict=True):
            state.slots[slot] = grad
        if self.tracer is not None:
            self.tracer.work(start, ACTIVITY[work.op.kind], str(work.op), work.op)

    def _gather(self, work: Gather, state: _Running) -> None:
        bank = state.inputs.this
        for part in work.parts:
            for handle, message in bank.waiting(work.value, part.device, part.first, part.last):
                self._wait(handle, message.channel.source, message.tag)
        if work.buffer is None:
            part = work.parts[0]
            state.slots[work.slot] = bank.read(work.value, part.device, part.first, part.last)
            return
        target = state.slots[work.slot] = state.buffers[work.buffer]
        for part in work.parts:
            rows = part.last - part.first
            stop = part.start + (rows - 1) * part.step + 1
            source = bank.read(work.value, part.device, part.first, part.last)
            target[part.start : stop : part.step].copy_(source)

    def _encode(self, work: Encode, state: _Running) -> None:
        bank = state.bank(work.when)
        if work.owner is not None:
            self._await_fields(work, work.owner, bank)
        start = self.tracer.mark() if self.tracer is not None else 0
        self._frozen.run(work, bank)
        if self.tracer is not None:
            self.tracer.work(start, Activity.FROZEN, describe(work))

    def _await_fields(self, work: Encode, owner: int, bank: Encodings) -> None:
        """Wait for the batch fields of another device's samples.

        Fields that live on the host (draw keys) are fetched on a stream of their own: on the
        layers' stream the host would wait until all that is queued there is done.
        """
        for value in work.fields:
            if self._aside is None or not bank.on_host(value):
                for handle, message in bank.waiting(value, owner, work.first, work.last):
                    self._wait(handle, message.channel.source, message.tag)
                continue
            due = bank.waiting(value, owner, 0, bank.sizes[owner])
            with torch.cuda.stream(self._aside):
                for handle, message in due:
                    self._wait(handle, message.channel.source, message.tag)
                bank.to_host(value, owner)

    def _wait(self, handle: Handle, source: int, tag: str) -> None:
        if self.tracer is None:
            handle.wait()
            return
        start = self.tracer.mark()
        handle.wait()
        self.tracer.wait(start, source, tag)

    def _draws(self, first_row: int, state: _Running) -> DrawContext:
        return DrawContext(
            seed=self._seed,
            batch_index=state.inputs.batch_index,
            group=self._group,
            first_row=first_row,
        )

    def _scale(self, loss: Tensor, value: float) -> Tensor:
        """Root gradient of the per-sample losses, made once per size."""
        key = (loss.shape[0], value)
        if key not in self._scales:
            self._scales[key] = torch.full_like(loss, value)
        return self._scales[key]


def _apart(tensor: Tensor, inputs: Mapping[int, Tensor]) -> Tensor:
    """Copy an output that is a view of an input: the input's buffer is reused before it is sent."""
    storage = tensor.untyped_storage().data_ptr()
    if any(storage == x.untyped_storage().data_ptr() for x in inputs.values()):
        return tensor.clone()
    return tensor


def describe(instruction: Instruction) -> str:
    """Name an instruction for a message or a chart."""
    match instruction:
        case Forward(op=op) | Backward(op=op):
            kind = {"F": "forward", "B": "backward", "S": "self-conditioning forward"}
            word = kind.get(op.kind.value, op.kind.value)
            return f"stage {op.stage}, {word}, micro-batch {op.microbatch} (op {op})"
        case Encode():
            return str(
                FrozenWork(
                    component=instruction.component,
                    start=instruction.start,
                    stop=instruction.stop,
                    first=instruction.first,
                    last=instruction.last,
                    owner=instruction.owner,
                )
            )
        case WaitRecv(tag=tag):
            return f"waiting for message {tag}"
        case _:
            return type(instruction).__name__

"""Third pass: free slots after their last use, and reuse buffers whose slot has been freed."""

from collections.abc import Iterable
from dataclasses import replace

from lightning_dpipe.core.program import (
    Backward,
    BufferSpec,
    Forward,
    Free,
    Gather,
    Instruction,
    PostRecv,
    Send,
    WaitRecv,
    Zeros,
)
from lightning_dpipe.lowering.emit import Emitted


def free_and_number(device: Emitted) -> tuple[tuple[Instruction, ...], int, tuple[BufferSpec, ...]]:
    """Return (instructions, number of slots, buffers) of one device."""
    flat = [x for step in device.steps for x in step.instructions]
    last_use: dict[int, int] = {}
    for at, instruction in enumerate(flat):
        for slot in _uses(instruction, device):
            last_use[slot] = at
    dying: dict[int, list[int]] = {}
    for slot, at in last_use.items():
        if slot not in device.pinned:
            dying.setdefault(at, []).append(slot)
    return (*_number(flat, dying, device),)


def _number(
    flat: list[Instruction], dying: dict[int, list[int]], device: Emitted
) -> tuple[tuple[Instruction, ...], int, tuple[BufferSpec, ...]]:
    out: list[Instruction] = []
    buffers: list[BufferSpec] = []
    free: dict[BufferSpec, list[int]] = {}
    held: dict[int, int] = {}

    def take(slot: int) -> int:
        if slot in held:  # another piece of the same micro-batch
            return held[slot]
        spec = device.specs[slot]
        pool = free.setdefault(spec, [])
        if not pool:
            buffers.append(spec)
            pool.append(len(buffers) - 1)
        held[slot] = pool.pop()
        return held[slot]

    for at, instruction in enumerate(flat):
        match instruction:
            case PostRecv() | Zeros():
                out.append(replace(instruction, buffer=take(instruction.slot)))
            case Gather() if instruction.buffer is not None:
                out.append(replace(instruction, buffer=take(instruction.slot)))
            case _:
                out.append(instruction)
        for slot in dying.get(at, ()):
            if slot in held:
                index = held.pop(slot)
                free[buffers[index]].append(index)
        if at in dying:
            out.append(Free(slots=tuple(sorted(dying[at]))))
    return tuple(out), device.num_slots, tuple(buffers)


def _uses(instruction: Instruction, device: Emitted) -> Iterable[int]:
    """Slots an instruction reads or writes, and those its autograd graph still reads."""
    match instruction:
        case PostRecv() | WaitRecv() | Send() | Gather() | Zeros():
            yield instruction.slot
        case Forward():
            yield from (slot for _, slot in instruction.reads + instruction.writes)
            if instruction.feedback is not None:
                yield instruction.feedback
        case Backward():
            yield from (slot for _, slot in instruction.grads + instruction.returns)
            yield from device.holds.get(instruction.op, ())
        case _:
            return

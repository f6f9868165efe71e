"""Tiny hand-written programs: two ranks, activations down, gradients back, rows both ways."""

from collections.abc import Sequence

from lightning_dpipe.core.op import Op
from lightning_dpipe.core.program import (
    Backward,
    BufferSpec,
    Channel,
    Forward,
    Free,
    Gather,
    Instruction,
    Lane,
    Message,
    Part,
    PostRecv,
    PostRows,
    Program,
    Send,
    SendRows,
    StepShape,
    WaitRecv,
    When,
)

SHAPE = (4, 8)


def message(source: int, target: int, tag: str, *, lane: Lane = Lane.PIPELINE) -> Message:
    channel = Channel(source=source, target=target, lane=lane)
    return Message(channel=channel, tag=tag, shape=SHAPE, dtype="float32")


def post(msg: Message, slot: int, buffer: int = 0) -> PostRecv:
    return PostRecv(message=msg, slot=slot, buffer=buffer, first=0, last=msg.shape[0])


def wait(msg: Message, slot: int) -> WaitRecv:
    return WaitRecv(slot=slot, tag=msg.tag)


def send(msg: Message, slot: int) -> Send:
    return Send(message=msg, slot=slot, first=0, last=msg.shape[0])


def free(*slots: int) -> Free:
    return Free(slots=slots)


def post_rows(
    msg: Message, *, device: int, first: int = 0, last: int = 4, when: When = When.THIS
) -> PostRows:
    return PostRows(message=msg, value=9, device=device, first=first, last=last, when=when)


def send_rows(msg: Message, *, first: int = 0, last: int = 4, when: When = When.THIS) -> SendRows:
    return SendRows(message=msg, value=9, first=first, last=last, when=when)


def gather(slot: int, *parts: tuple[int, int, int], buffer: int | None = None) -> Gather:
    """Parts are (device, first, last)."""
    return Gather(
        value=9,
        slot=slot,
        parts=tuple(
            Part(device=d, first=a, last=b, start=i, step=len(parts))
            for i, (d, a, b) in enumerate(parts)
        ),
        buffer=buffer,
    )


def forward(
    op: str, reads: Sequence[int] = (), writes: Sequence[int] = (), *, training: bool = True
) -> Forward:
    return Forward(
        op=Op.parse(op),
        reads=tuple((slot, slot) for slot in reads),
        writes=tuple((slot, slot) for slot in writes),
        training=training,
        loss=not writes,
        feedback=None,
        first_row=0,
        rows=4,
    )


def backward(op: str, grads: Sequence[int] = (), returns: Sequence[int] = ()) -> Backward:
    return Backward(
        op=Op.parse(op),
        grads=tuple((slot, slot) for slot in grads),
        returns=tuple((slot, slot) for slot in returns),
    )


def program(
    rank: int,
    *instructions: Instruction,
    device: int | None = None,
    num_slots: int = 16,
    num_buffers: int = 4,
    encoded: bool = False,
) -> Program:
    return Program(
        rank=rank,
        device=rank if device is None else device,
        shape=StepShape(sizes=(4, 4), encoded=encoded),
        num_slots=num_slots,
        buffers=(BufferSpec(shape=SHAPE, dtype="float32"),) * num_buffers,
        instructions=instructions,
    )


def pipeline(num_microbatches: int, *, first_rank: int = 0) -> tuple[Program, Program]:
    """GPipe on two stages, one slot per tensor, receives posted ahead."""
    a, b = first_rank, first_rank + 1
    acts = [message(a, b, f"h/{m}") for m in range(num_microbatches)]
    grads = [message(b, a, f"dh/{m}") for m in range(num_microbatches)]
    ms = range(num_microbatches)
    n = num_microbatches
    first: list[Instruction] = [post(grads[m], n + m, m) for m in ms]
    for m in ms:
        first += [forward(f"0F{m}", (), (m,)), send(acts[m], m)]
    for m in ms:
        first += [wait(grads[m], n + m), backward(f"0B{m}", (n + m,)), free(m, n + m)]
    second: list[Instruction] = [post(acts[m], m, m) for m in ms]
    for m in ms:
        second += [wait(acts[m], m), forward(f"1F{m}", (m,))]
    for m in ms:
        second += [backward(f"1B{m}", (), (n + m,)), send(grads[m], n + m), free(m, n + m)]
    sizes = {"num_slots": 2 * n, "num_buffers": n}
    return program(a, *first, device=0, **sizes), program(b, *second, device=1, **sizes)

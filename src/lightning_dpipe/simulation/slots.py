"""One program's slots and buffers, followed instruction by instruction.

A slot is *empty*, *posted* (a receive is under way) or *full*. A buffer belongs to whatever may
still read it: the slot in it, a send that is only waited for at the end of the step, and the
backward of a training forward that read it (autograd keeps the tensor, whatever the slot does).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.program import (
    Backward,
    BufferSpec,
    Forward,
    Free,
    Gather,
    Instruction,
    Message,
    PostRecv,
    Program,
    Send,
    WaitRecv,
    Zeros,
)


def check_slots(program: Program) -> None:
    """Check that slots are full when read and empty when written, and that buffers are not shared.

    Raises:
        ScheduleError: They are not; rank, instruction index and slot are named.
    """
    book = _Book(program)
    for index, instruction in enumerate(program.instructions):
        book.index = index
        book.apply(instruction)
    book.index = len(program.instructions)
    for slot, posted in sorted(book.posted.items()):
        tags = ", ".join(posted)
        raise book.error(f"slot {slot} ({tags}) is posted but never waited for", "add a WaitRecv")


@dataclass(slots=True)
class _Book:
    program: Program
    index: int = 0
    posted: dict[int, dict[str, Message]] = field(default_factory=dict)
    pieces: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    freed: dict[int, int] = field(default_factory=dict)
    buffer_of: dict[int, int] = field(default_factory=dict)
    holders: dict[int, dict[str, str]] = field(default_factory=dict)
    forwards: set[tuple[int, int]] = field(default_factory=set)
    input_grads: set[tuple[int, int]] = field(default_factory=set)
    split: set[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.split = {
            (i.op.stage, i.op.microbatch)
            for i in self.program.instructions
            if isinstance(i, Backward) and i.op.kind is OpKind.W
        }

    def error(self, problem: str, remedy: str) -> ScheduleError:
        return ScheduleError(
            f"rank {self.program.rank}, instruction {self.index}: {problem}; {remedy}"
        )

    def apply(self, instruction: Instruction) -> None:
        match instruction:
            case PostRecv():
                self.post(instruction)
            case WaitRecv(slot=slot, tag=tag):
                posted = self.posted.get(slot, {})
                if tag not in posted:
                    found = ", ".join(posted) or "nothing"
                    raise self.error(
                        f"waits for {tag} in slot {slot}, where {found} is posted",
                        "put its PostRecv before it",
                    )
                del posted[tag]
                if not posted:
                    del self.posted[slot]
                    self.full.add(slot)
            case Send(slot=slot, message=message):
                self.read((slot,))
                self.hold_more(slot, "send", f"the send of {message.tag}, waited for at the end")
            case Gather(slot=slot, buffer=buffer):
                self.write(slot)
                if buffer is not None:
                    self.hold(buffer, slot)
            case Zeros(slot=slot, buffer=buffer):
                self.write(slot)
                self.hold(buffer, slot)
            case Forward():
                self.forward(instruction)
            case Backward():
                self.backward(instruction)
            case Free(slots=slots):
                for slot in slots:
                    self.free(slot)
            case _:
                pass  # Encode, PostRows, SendRows and Reduce touch no slot

    def post(self, instruction: PostRecv) -> None:
        """One piece of a slot: the first takes the buffer, the others must fill what is left."""
        message, slot, buffer = instruction.message, instruction.slot, instruction.buffer
        first, last = instruction.first, instruction.last
        if slot not in self.posted:
            self.write(slot)
            self.hold(buffer, slot)
            self.full.discard(slot)
            self.posted[slot], self.pieces[slot] = {}, []
        spec = self.program.buffers[buffer]
        wanted = BufferSpec(shape=(last - first, *spec.shape[1:]), dtype=spec.dtype)
        if BufferSpec(shape=message.shape, dtype=message.dtype) != wanted or last > spec.shape[0]:
            raise self.error(
                f"receives {message.dtype}{list(message.shape)} into rows {first}:{last} of buffer "
                f"{buffer} of {spec.dtype}{list(spec.shape)}",
                "give it a buffer of its own shape",
            )
        if any(first < b and a < last for a, b in self.pieces[slot]):
            raise self.error(
                f"rows {first}:{last} of slot {slot} are received twice", "post each row once"
            )
        self.pieces[slot].append((first, last))
        self.posted[slot][message.tag] = message

    def forward(self, instruction: Forward) -> None:
        op, slots = instruction.op, [slot for _, slot in instruction.reads]
        self.read(slots)
        if instruction.training:
            if (op.stage, op.microbatch) in self.forwards:
                raise self.error(f"{op} runs twice", "run each training forward once")
            self.forwards.add((op.stage, op.microbatch))
            for slot in slots:
                self.hold_more(slot, f"{op.stage}/{op.microbatch}", f"the backward of {op}")
        for _, slot in instruction.writes:
            self.write(slot)
        if instruction.feedback is not None:
            self.write(instruction.feedback)

    def backward(self, instruction: Backward) -> None:
        op = instruction.op
        key = (op.stage, op.microbatch)
        if key not in (self.input_grads if op.kind is OpKind.W else self.forwards):
            need = "I" if op.kind is OpKind.W else "training F"
            raise self.error(
                f"{op} has no {need} of its micro-batch before it, or a backward took it already",
                f"run the {need} first, and each backward once",
            )
        self.read([slot for _, slot in instruction.grads])
        self.forwards.discard(key)
        self.input_grads.discard(key)
        if op.kind is OpKind.I and key in self.split:
            self.input_grads.add(key)  # its W still needs the inputs
        else:
            for held in self.holders.values():
                held.pop(f"{op.stage}/{op.microbatch}", None)
        for _, slot in instruction.returns:
            self.write(slot)

    def read(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in self.full:
                self.check_pieces(slot)
                continue
            if slot in self.posted:
                raise self.error(
                    f"reads slot {slot} before {', '.join(self.posted[slot])} has arrived",
                    "wait for it first",
                )
            if slot in self.freed:
                raise self.error(
                    f"reads slot {slot}, freed at instruction {self.freed[slot]}",
                    "free it after its last reader",
                )
            raise self.error(f"reads slot {slot}, which nothing has written", "write it first")

    def check_pieces(self, slot: int) -> None:
        if slot in self.pieces:
            received = sum(last - first for first, last in self.pieces[slot])
            rows = self.program.buffers[self.buffer_of[slot]].shape[0]
            if received != rows:
                raise self.error(
                    f"reads slot {slot}, of which {received} of {rows} rows are received",
                    "post the missing rows",
                )

    def write(self, slot: int) -> None:
        if not 0 <= slot < self.program.num_slots:
            raise self.error(
                f"writes slot {slot} of {self.program.num_slots}", "raise the program's num_slots"
            )
        if slot in self.full or slot in self.posted:
            raise self.error(f"writes slot {slot}, which is in use", "free it first")
        self.full.add(slot)
        self.freed.pop(slot, None)

    def free(self, slot: int) -> None:
        self.read((slot,))
        self.full.discard(slot)
        self.freed[slot] = self.index
        self.pieces.pop(slot, None)
        buffer = self.buffer_of.pop(slot, None)
        if buffer is not None:
            del self.holders[buffer]["slot"]

    def hold(self, buffer: int, slot: int) -> None:
        buffers = self.program.buffers
        if not 0 <= buffer < len(buffers):
            raise self.error(f"uses buffer {buffer} of {len(buffers)}", "add it to the program")
        held = self.holders.setdefault(buffer, {})
        if held:
            raise self.error(
                f"writes slot {slot} into buffer {buffer}, still held by "
                + " and ".join(held.values()),
                "use another buffer",
            )
        held["slot"] = f"slot {slot}"
        self.buffer_of[slot] = buffer

    def hold_more(self, slot: int, key: str, reason: str) -> None:
        buffer = self.buffer_of.get(slot)
        if buffer is not None:
            self.holders[buffer][key] = reason

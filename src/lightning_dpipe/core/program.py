"""A Program: the straight-line typed instructions of one rank for one step.

Tensors live in numbered *slots*. Slots that a receive or a gather fills have a *buffer*, allocated
once per program and reused when its last reader is done; slots that compute fills hold whatever
the layer returned. Nothing here depends on a rank's identity: there is no ``if rank ==``.

Two message classes, each with its own channel per directed edge of ranks, in FIFO order:
*pipeline* messages carry graph state and gradients between stages inside the step; *row* messages
deliver encoded samples of this or the next batch from the rank that encoded them.
"""

from dataclasses import dataclass
from enum import Enum

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.op import Op


class Lane(str, Enum):
    """Message class of a channel."""

    PIPELINE = "pipeline"
    ROWS = "rows"


class When(str, Enum):
    """Which batch an encoding belongs to."""

    THIS = "this"
    NEXT = "next"


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Directed edge between two ranks. Messages on it arrive in the order they were sent."""

    source: int
    target: int
    lane: Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one transfer carries; equal on both sides (the manifest compares it).

    `tag` tells messages of a channel apart: value, micro-batch and purpose as text.
    """

    channel: Channel
    tag: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """A buffer that a receive or gather writes."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PostRecv:
    """Start receiving `message` into rows ``[first, last)`` of the buffer of `slot`.

    A micro-batch whose rows come from several replicas is received in pieces, one post each.
    """

    message: Message
    slot: int
    buffer: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRecv:
    """Wait until message `tag`, all or a piece of `slot`, has arrived."""

    slot: int
    tag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Start sending rows ``[first, last)`` of `slot`.

    The engine keeps the tensor alive and waits for the send at the end of the step.
    """

    message: Message
    slot: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PostRows:
    """Start receiving samples ``[first, last)`` of `value` from the local batch of `device`."""

    message: Message
    value: int
    device: int
    first: int
    last: int
    when: When


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRows:
    """Start sending samples ``[first, last)`` of `value` that this rank loaded or encoded.

    They are from the local batch of device `owner`, None: from this rank's own.
    """

    message: Message
    value: int
    first: int
    last: int
    when: When
    owner: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples ``[first, last)`` of `device`'s local batch go to rows ``start, start+step, ...``."""

    device: int
    first: int
    last: int
    start: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Put the samples of one micro-batch together in slot order.

    A single contiguous part is a view (`buffer` None); several are copied into the buffer.
    """

    value: int
    slot: int
    parts: tuple[Part, ...]
    buffer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros:
    """Fill the buffer of `slot` with zeros (the feedback value when nothing is fed back)."""

    slot: int
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Run layers ``[start, stop)`` of a frozen component on local samples ``[first, last)``.

    With an `owner` the samples are those of that device's local batch: their batch fields `fields`
    are received, and must have arrived. `rows` is how many of the owner's samples this rank encodes
    in all, None: the whole local batch.
    """

    component: str
    start: int
    stop: int
    first: int
    last: int
    when: When
    owner: int | None = None
    fields: tuple[int, ...] = ()
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run a stage on one micro-batch.

    `reads` and `writes` are (value, slot). `training` keeps what the backward needs; otherwise the
    op runs without gradients (an S sweep, or evaluation). `loss` says that this op also computes
    the backbone's loss, `feedback` is the slot its self-conditioning estimate goes to. `rows` is
    the number of samples, `first_row` the position of the first in the group's batch.
    """

    op: Op
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    training: bool
    loss: bool
    feedback: int | None
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Back-propagate a stage on one micro-batch.

    `grads` are (value, slot) of gradients that came in, for values written here and for values
    read here that a later stage reads too. `returns` are (value, slot) of gradients to send on.
    """

    op: Op
    grads: tuple[tuple[int, int], ...]
    returns: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """The stage's gradients are complete: start summing them over the pipeline groups."""

    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Drop the references to these slots."""

    slots: tuple[int, ...]


Instruction = (
    PostRecv | WaitRecv | Send | PostRows | SendRows | Gather | Zeros | Encode | Forward | Backward
    | Reduce | Free
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """All that a program depends on beside the plan: the key under which it is lowered once.

    `sizes[d]` is the local batch size of the group's device `d`, `next_sizes` that of the batch
    to encode ahead (None: nothing is). `encoded` says that this batch was encoded in the step
    before. Programs without `training` are forward only. `bucket` and `next_bucket` are the
    classes of per-sample shapes of the two batches (`core.buckets`). `cached` and `next_cached` are
    the groups of kept encodings that are at hand (`core.caching`).
    """

    sizes: tuple[int, ...]
    next_sizes: tuple[int, ...] | None = None
    encoded: bool = False
    self_conditioned: bool = False
    training: bool = True
    reduce: bool = True
    bucket: str = BASE
    next_bucket: str = BASE
    cached: tuple[int, ...] = ()
    next_cached: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions of one rank; `device` is its position in the group, `rank` its global rank."""

    rank: int
    device: int
    shape: StepShape
    num_slots: int
    buffers: tuple[BufferSpec, ...]
    instructions: tuple[Instruction, ...]

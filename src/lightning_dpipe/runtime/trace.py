"""Measured timelines: what each rank did when, merged into one Timeline.

A rank records host times on CPU, and CUDA events on a GPU that are read after the step, so that
tracing does not hold up the host. A wait is split afterwards with the sender's clock: until the
sender had sent, this device had nothing to do (bubble); from then on the message was on its way
(exposed transfer).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.timeline import Activity, Span, Timeline

ACTIVITY = {
    OpKind.F: Activity.FORWARD,
    OpKind.S: Activity.SELF_CONDITIONING,
    OpKind.B: Activity.BACKWARD,
    OpKind.I: Activity.BACKWARD,
    OpKind.W: Activity.BACKWARD,
    OpKind.N: Activity.FROZEN,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded interval, in nanoseconds of the rank's monotonic clock. Plain: it is pickled."""

    start_ns: int
    end_ns: int
    activity: Activity
    label: str
    op: Op | None


@dataclass(frozen=True, slots=True)
class Wait:
    """The device waited for message `key` = (source rank, tag)."""

    start_ns: int
    end_ns: int
    key: tuple[int, str]


@dataclass(slots=True)
class StepTrace:
    """All that one rank recorded of one step."""

    device: int
    start_ns: int = 0
    end_ns: int = 0
    records: list[Record] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    sends: dict[tuple[int, int, str], int] = field(default_factory=dict)
    rank: int = 0


Mark = int | torch.cuda.Event


class Tracer:
    """Collects marks during a step and turns them into a StepTrace after it."""

    def __init__(self, device: torch.device, rank: int, position: int) -> None:
        self._cuda = device.type == "cuda"
        self._rank, self._position = rank, position
        self._pending: list[tuple[Mark, Mark, Activity, str, Op | None]] = []
        self._waits: list[tuple[Mark, Mark, tuple[int, str]]] = []
        self._sends: dict[tuple[int, int, str], Mark] = {}
        self._origin: tuple[int, Mark] = (0, 0)

    def begin(self) -> None:
        """Start a step."""
        self._pending, self._waits, self._sends = [], [], {}
        self._origin = (time.monotonic_ns(), self.mark())

    def mark(self) -> Mark:
        """Now, on the device."""
        if not self._cuda:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def work(self, start: Mark, activity: Activity, label: str, op: Op | None = None) -> None:
        """Work that ran from `start` until now."""
        self._pending.append((start, self.mark(), activity, label, op))

    def wait(self, start: Mark, source: int, tag: str) -> None:
        """A wait for a message from `start` until now."""
        self._waits.append((start, self.mark(), (source, tag)))

    def sent(self, target: int, tag: str) -> None:
        """A message was handed to the transport now."""
        self._sends[(self._rank, target, tag)] = self.mark()

    def finish(self) -> StepTrace:
        """Read the marks. On a GPU this synchronises; call it between steps only."""
        end = self.mark()
        if self._cuda:
            torch.cuda.synchronize()
        at = self._nanoseconds
        return StepTrace(
            device=self._position,
            rank=self._rank,
            start_ns=at(self._origin[1]),
            end_ns=at(end),
            records=[
                Record(at(a), at(b), act, label, op) for a, b, act, label, op in self._pending
            ],
            waits=[Wait(at(a), at(b), key) for a, b, key in self._waits],
            sends={key: at(mark) for key, mark in self._sends.items()},
        )

    def _nanoseconds(self, mark: Mark) -> int:
        if isinstance(mark, int):
            return mark
        host_ns, origin = self._origin
        assert not isinstance(origin, int)
        return host_ns + int(origin.elapsed_time(mark) * 1e6)


def merge(traces: Sequence[StepTrace]) -> Timeline:
    """Put the ranks of one group together; 0 is when the first rank started.

    Waits become exposed-transfer spans where the sender had already sent, else stay bubble.
    """
    origin = min(t.start_ns for t in traces)
    sent = {key: ns for t in traces for key, ns in t.sends.items()}
    spans: list[Span] = []
    for trace in traces:
        for r in trace.records:
            spans.append(
                _span(trace.device, r.start_ns, r.end_ns, origin, r.activity, r.label, r.op)
            )
        for w in trace.waits:
            source, tag = w.key
            begin = max(w.start_ns, sent.get((source, trace.rank, tag), w.end_ns))
            if begin < w.end_ns:
                spans.append(
                    _span(trace.device, begin, w.end_ns, origin, Activity.TRANSFER, tag, None)
                )
    spans = [s for s in spans if s.length_us > 0]
    return Timeline(
        num_devices=len(traces),
        end_us=(max(t.end_ns for t in traces) - origin) // 1000,
        spans=tuple(sorted(spans, key=lambda s: (s.device, s.start_us))),
        predicted=False,
    )


def _span(
    device: int, start: int, end: int, origin: int, activity: Activity, label: str, op: Op | None
) -> Span:
    return Span(
        device=device,
        start_us=(start - origin) // 1000,
        end_us=(end - origin) // 1000,
        activity=activity,
        label=label,
        op=op,
    )

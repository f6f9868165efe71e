"""Ops with start and end, predicted or measured: one type, so that the two can be compared."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.op import Op


class Activity(str, Enum):
    """What a device does during a span. Everything else is a bubble."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SELF_CONDITIONING = "self_conditioning"
    FROZEN = "frozen"
    TRANSFER = "transfer"  # exposed: waiting for a message that is already on its way
    SYNC = "sync"  # exposed: waiting for the gradient reduction
    OPTIMIZER = "optimizer"
    DATA = "data"
    HOST = "host"


PIPELINE = frozenset({Activity.FORWARD, Activity.BACKWARD, Activity.SELF_CONDITIONING})


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWork:
    """Layers ``[start, stop)`` of a frozen component on local samples ``[first, last)``.

    Prints as ``text[0:3] 0:16``, the label of frozen spans; ``text[0:3] 0:16 of 2`` says that the
    samples are those of device `owner` = 2.
    """

    component: str
    start: int
    stop: int
    first: int
    last: int
    owner: int | None = None

    def __str__(self) -> str:
        guest = "" if self.owner is None else f" of {self.owner}"
        return f"{self.component}[{self.start}:{self.stop}] {self.first}:{self.last}{guest}"

    @classmethod
    def parse(cls, label: str) -> "FrozenWork":
        """Read a frozen span's label.

        Raises:
            DPipeError: It is not one.
        """
        found = re.fullmatch(r"(.+)\[(\d+):(\d+)\] (\d+):(\d+)(?: of (\d+))?", label)
        if found is None:
            raise DPipeError(f"{label!r} is not the label of frozen work, as in text[0:3] 0:16")
        start, stop, first, last = map(int, found.groups()[1:5])
        owner = None if found[6] is None else int(found[6])
        return cls(component=found[1], start=start, stop=stop, first=first, last=last, owner=owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Half-open interval ``[start_us, end_us)`` on one device. Spans of a device do not overlap."""

    device: int
    start_us: int
    end_us: int
    activity: Activity
    label: str
    op: Op | None = None

    @property
    def length_us(self) -> int:
        """Duration."""
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One iteration on all devices, from 0 to `end_us`, spans sorted by (device, start)."""

    num_devices: int
    end_us: int
    spans: tuple[Span, ...]
    predicted: bool

    @cached_property
    def flush_us(self) -> int:
        """When the last pipeline op ends."""
        return max((s.end_us for s in self.spans if s.activity in PIPELINE), default=0)

    def total_us(self, activities: Iterable[Activity] | Activity) -> int:
        """Device time spent in the given activities."""
        chosen = {activities} if isinstance(activities, Activity) else set(activities)
        return sum(s.length_us for s in self.spans if s.activity in chosen)

    @property
    def bubble_us(self) -> int:
        """Idle device time."""
        return self.num_devices * self.end_us - sum(s.length_us for s in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """Idle time / (devices x iteration time)."""
        return self.bubble_us / (self.num_devices * self.end_us) if self.end_us else 0.0

    @property
    def fill_ratio(self) -> float:
        """Frozen time before the pipeline has flushed, on a device whose first op is past, / all.

        Frozen work before a device's first op that nothing hides (an unfilled prologue) delays the
        pipeline, so it counts as filled only if that device would have been idle: see
        `first_op_us`.
        """
        total = self.total_us(Activity.FROZEN)
        inside = sum(
            max(0, min(s.end_us, self.flush_us) - max(s.start_us, self.first_op_us))
            for s in self.spans
            if s.activity is Activity.FROZEN
        )
        return inside / total if total else 0.0

    @cached_property
    def first_op_us(self) -> int:
        """When the first pipeline op of any device starts."""
        return min((s.start_us for s in self.spans if s.activity in PIPELINE), default=0)

    def ledger(self) -> dict[str, int]:
        """Device time per activity and ``bubble``; sums to ``num_devices * end_us``."""
        rows = {activity.value: self.total_us(activity) for activity in Activity}
        return rows | {"bubble": self.bubble_us}

"""Idle intervals of a timeline, each named by the op it follows.

In:     a Timeline, predicted or measured.
Out:    every interval in which a device does nothing, sorted by (device, start).
"""

from dataclasses import dataclass

from lightning_dpipe.core.op import Op
from lightning_dpipe.core.timeline import PIPELINE, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """Idle interval ``[start_us, end_us)``; `after` is the device's last op before it, if any."""

    device: int
    after: Op | None
    start_us: int
    end_us: int

    @property
    def length_us(self) -> int:
        """Duration."""
        return self.end_us - self.start_us


def bubbles(timeline: Timeline) -> tuple[Bubble, ...]:
    """All idle intervals from 0 to the end of the iteration."""
    found: list[Bubble] = []
    for device in range(timeline.num_devices):
        free_us, after = 0, None
        for span in (s for s in timeline.spans if s.device == device):
            if span.start_us > free_us:
                found.append(
                    Bubble(device=device, after=after, start_us=free_us, end_us=span.start_us)
                )
            free_us = max(free_us, span.end_us)
            if span.activity in PIPELINE:
                after = span.op
        if timeline.end_us > free_us:
            found.append(
                Bubble(device=device, after=after, start_us=free_us, end_us=timeline.end_us)
            )
    return tuple(found)

"""How long a piece of work takes on a device.

In:     a function that starts the work. Out: its result and microseconds of device time.
Repeats are summed up by their median, which a few disturbed runs do not move.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Clock(Protocol):
    """Measures work on one device. Tests pass one of their own that counts instead."""

    def measure(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run `work` once; return its result and how long the device took, in microseconds."""


@dataclass(frozen=True, slots=True)
class HostClock:
    """Wall time of the host, for devices that compute while the call lasts (CPU)."""

    def measure(self, work: Callable[[], T]) -> tuple[T, float]:
        """See `Clock`."""
        start_ns = time.perf_counter_ns()
        result = work()
        return result, (time.perf_counter_ns() - start_ns) / 1000


@dataclass(frozen=True, slots=True)
class CudaClock:
    """Time between two events on the current stream; waits for the device after each measurement.

    A layer whose kernels are shorter than their launches is as long as its launches, as it is in
    training.
    """

    device: torch.device

    def measure(self, work: Callable[[], T]) -> tuple[T, float]:
        """See `Clock`."""
        torch.cuda.synchronize(self.device)
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        result = work()
        end.record(stream)
        end.synchronize()
        return result, start.elapsed_time(end) * 1000


def clock_for(device: torch.device) -> Clock:
    """The clock that measures work on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def median_us(times_us: Sequence[float]) -> int:
    """The median in whole microseconds, rounded up: no work that was measured costs nothing."""
    return -int(-statistics.median(times_us) // 1) if times_us else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often to measure work of a given length.

    `warmup` and `repeats` hold for work of ordinary length. Long work is repeated less, as far as
    `total_us` allows but at least three times; short work is noisier and repeated up to three times
    as often.
    """

    warmup: int = 2
    repeats: int = 5
    total_us: float = 3e6

    def count(self, once_us: float) -> int:
        """Measured repeats of work that takes `once_us`."""
        affordable = int(self.total_us / max(once_us, 1.0))
        if affordable < self.repeats:
            return max(affordable, min(3, self.repeats))
        short = once_us * 3 * self.repeats < self.total_us / 10
        return 3 * self.repeats if short else self.repeats

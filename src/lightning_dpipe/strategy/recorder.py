"""Times of one traced iteration on this rank: the engine's own trace and what Lightning adds to it.

In:     marks from the strategy and a callback.
Out:    a StepTrace that covers the whole iteration; what nothing claims is host time.
"""

import time

import torch

from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.runtime.trace import Record, StepTrace


class Recorder:
    """Collects intervals outside the engine while an iteration is traced."""

    def __init__(self, device: torch.device, start_ns: int) -> None:
        self._cuda = device.type == "cuda"
        self.start_ns = start_ns
        self.records: list[Record] = []

    def now_ns(self) -> int:
        """The host's monotonic clock, after the device has done all it was given."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.monotonic_ns()

    def add(self, start_ns: int, activity: Activity, label: str) -> None:
        """An interval from `start_ns` until now."""
        self.records.append(Record(start_ns, self.now_ns(), activity, label, None))

    def iteration(self, step: StepTrace) -> StepTrace:
        """The engine's trace, widened to the iteration that ends now."""
        end_ns = self.now_ns()
        inside = (step.start_ns, step.end_ns)
        claimed = sorted([inside, *((r.start_ns, r.end_ns) for r in self.records)])
        host, at_ns = [], self.start_ns
        for start_ns, stop_ns in [*claimed, (end_ns, end_ns)]:
            if start_ns > at_ns:
                host.append(Record(at_ns, start_ns, Activity.HOST, "host", None))
            at_ns = max(at_ns, stop_ns)
        return StepTrace(
            device=step.device,
            rank=step.rank,
            start_ns=self.start_ns,
            end_ns=end_ns,
            records=[*step.records, *self.records, *host],
            waits=step.waits,
            sends=step.sends,
        )

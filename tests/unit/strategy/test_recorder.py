"""The iteration's records cover it exactly."""

import torch

from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.runtime.trace import Record, StepTrace, merge
from lightning_dpipe.strategy.recorder import Recorder


def test_what_nothing_claims_is_host_time_and_all_sums_to_the_iteration() -> None:
    clock = [0]

    class Frozen(Recorder):
        def now_ns(self) -> int:
            return clock[0]

    recorder = Frozen(torch.device("cpu"), 1_000_000)
    clock[0] = 3_000_000
    recorder.add(1_000_000, Activity.DATA, "data")
    work = Record(4_000_000, 6_000_000, Activity.FORWARD, "0F0", None)
    step = StepTrace(device=0, start_ns=4_000_000, end_ns=7_000_000, records=[work])
    clock[0] = 9_000_000
    recorder.add(8_000_000, Activity.OPTIMIZER, "optimizer step")
    clock[0] = 10_000_000
    ledger = merge([recorder.iteration(step)]).ledger()
    expected = {"data": 2000, "forward": 2000, "optimizer": 1000, "host": 3000, "bubble": 1000}
    assert {k: v for k, v in ledger.items() if v} == expected
    assert sum(ledger.values()) == 9000

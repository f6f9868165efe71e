import statistics
import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.profiling.clock import HostClock, clock_for, median_us
from lightning_dpipe.profiling.optimizer import measure_optimizer


def test_the_host_clock_returns_the_result_and_at_least_the_time_slept() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    result, us = clock.measure(lambda: time.sleep(0.003) or "done")
    assert result == "done"
    assert us >= 3000


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=9))
def test_the_median_is_rounded_up_to_whole_microseconds(times_us: list[float]) -> None:
    assert 0 <= median_us(times_us) - statistics.median(times_us) <= 1
    assert median_us([]) == 0


class StepClock:
    """A step over n tensors of k elements takes 7 n + 0.25 n k microseconds."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.sizes: list[int] = []

    def measure(self, work):  # type: ignore[no-untyped-def]
        optimizer = work.__self__
        work()
        weights = optimizer.param_groups[0]["params"]
        return None, sum(7.0 + 0.25 * p.numel() for p in weights)


def test_the_optimizer_cost_splits_into_tensors_and_bytes() -> None:
    cost = measure_optimizer(StepClock(), torch.device("cpu"))
    assert cost.step_us(10, 4 * 1000) == 70 + 250
    assert cost.step_us(0, 0) == 0

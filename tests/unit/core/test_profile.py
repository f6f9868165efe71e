"""Costs: between and beyond the profiled sizes, and of messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.profile import Link, interpolate


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 200))
def test_a_line_is_found_again_at_every_size(fixed, slope, samples) -> None:
    sizes = (4, 8, 32)
    costs = tuple(fixed + slope * n for n in sizes)
    assert interpolate(sizes, costs, samples) == (fixed + slope * samples if samples else 0)


def test_one_profiled_size_is_taken_as_proportional() -> None:
    assert interpolate((8,), (80,), 2) == 20


def test_a_negative_count_is_named() -> None:
    with pytest.raises(ProfileError, match="the cost of -1 samples"):
        interpolate((8,), (80,), -1)


def test_a_message_costs_its_sender_a_fixed_time_and_the_copy() -> None:
    free = Link(latency_us=5, bytes_per_s=10**9)
    copied = Link(latency_us=5, bytes_per_s=10**9, host_us=7, host_bytes_per_s=2 * 10**9)
    assert free.send_us(10**6) == 0
    assert copied.send_us(10**6) == 7 + 500
    assert copied.transfer_us(10**6) == free.transfer_us(10**6) == 5 + 1000

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.profile import Link
from lightning_dpipe.profiling.links import fit, loopback_links, slowest


@settings(deadline=None, max_examples=60)
@given(latency_us=st.integers(0, 10_000), megabytes_per_s=st.integers(10, 100_000))
def test_the_line_gives_back_the_link_it_was_drawn_from(
    latency_us: int, megabytes_per_s: int
) -> None:
    points = [(n, latency_us + n / megabytes_per_s) for n in (1 << 10, 4 << 20)]
    link = fit(*points)
    if latency_us < 0.9 * points[1][1]:
        assert link.latency_us == latency_us
        assert link.bytes_per_s == pytest.approx(megabytes_per_s * 1e6, rel=1e-3)
    for num_bytes, time_us in points:
        assert link.transfer_us(num_bytes) <= time_us * 1.12 + 2


def test_a_large_message_that_seems_faster_than_a_small_one_gives_a_finite_link() -> None:
    link = fit((1 << 10, 900.0), (4 << 20, 800.0))
    assert 0 <= link.latency_us <= 900
    assert 0 < link.bytes_per_s < 10 * (4 << 20) / 800e-6 * 1.01


def test_the_slowest_of_each_figure_counts() -> None:
    links = [
        Link(latency_us=1, bytes_per_s=10, host_us=9),
        Link(latency_us=5, bytes_per_s=70, host_us=2),
    ]
    assert slowest(links) == Link(latency_us=5, bytes_per_s=10, host_us=9)


def test_one_process_gets_a_plausible_loopback() -> None:
    p2p, allreduce = loopback_links()
    assert 1e7 < allreduce.bytes_per_s < p2p.bytes_per_s < 1e12
    assert p2p.latency_us > 0

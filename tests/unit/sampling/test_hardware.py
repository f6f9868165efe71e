"""Transfers while all devices send, against sums over the links that bytes really cross."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.profile import Link
from lightning_dpipe.sampling.hardware import NVLINK, Hardware, LinkKind, Span

DEVICE = Device(
    name="toy",
    flops_per_s={"bfloat16": 10**14},
    memory_bytes=10**11,
    memory_bytes_per_s=10**12,
    max_efficiency=0.5,
    half_efficiency_flops=10**9,
    memory_efficiency=0.8,
    launch_us=5,
)


def hardware(nodes: int = 2, per_node: int = 4) -> Hardware:
    cluster = Cluster(
        name="toy",
        nodes=nodes,
        devices_per_node=per_node,
        device=DEVICE,
        inside=Link(latency_us=10, bytes_per_s=10**10, host_us=3),
        between=Link(latency_us=50, bytes_per_s=10**9, host_us=7),
        nic_bytes_per_s=2 * 10**9,
    )
    return Hardware(cluster=cluster, inside=NVLINK)


@given(st.sampled_from([(s, d) for d in (1, 2, 4) for s in (2, 4, 8) if s * d <= 8]))
def test_the_busiest_card_decides(case: tuple[int, int]) -> None:
    size, stride = case
    made, sent = hardware(), 6_720_000
    groups = [
        [start + offset + i * stride for i in range(size)]
        for start in range(0, 8, size * stride)
        for offset in range(stride)
    ]
    node = lambda rank: rank // 4  # noqa: E731
    hop = [0, 0]
    all_to_all = [0.0, 0.0]
    single = 0.0
    for ranks in groups:
        for i, rank in enumerate(ranks):
            if node(rank) != node(ranks[(i + 1) % size]):
                hop[node(rank)] += sent
            away = sum(sent / (size - 1) for peer in ranks if node(peer) != node(rank))
            all_to_all[node(rank)] += away
            single = max(single, away)
    span = Span(size=size, stride=stride)
    inside = sent / 10**10
    alone = sent / 10**9 if any(hop) else 0.0
    assert made.ring_us(span, sent) == pytest.approx(
        1e6 * max(inside, max(hop) / (2 * 10**9), alone)
    )
    assert made.exchange_us(span, sent) == pytest.approx(
        1e6 * max(inside, max(all_to_all) / (2 * 10**9), single / 10**9)
    )
    crossing = any(node(a) != node(b) for ranks in groups for a in ranks for b in ranks)
    assert made.crosses(span) == crossing
    assert (made.message_us(span), made.host_us(span)) == ((50, 7) if crossing else (10, 3))


def test_a_group_of_one_sends_nothing() -> None:
    assert hardware().ring_us(Span(size=1, stride=4), 1e9) == 0
    assert hardware().exchange_us(Span(size=1, stride=4), 1e9) == 0


def test_a_share_of_the_link_takes_longer() -> None:
    half = replace(hardware(), inside=LinkKind(name="half", share=0.5))
    span = Span(size=4, stride=1)
    assert half.ring_us(span, 1e9) == pytest.approx(2 * hardware().ring_us(span, 1e9))


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_side_by_side_is_no_faster_than_either_and_no_slower_than_both(a: float, b: float) -> None:
    both = hardware().beside_us(a, b)
    assert max(a, b) <= both <= a + b + 1e-9
    assert replace(hardware(), overlap_slowdown=1).beside_us(a, b) == max(a, b)


def test_kernels_beside_a_short_transfer_run_18_9_percent_longer_while_it_lasts() -> None:
    # 100 us of transfer: 100 us of kernel time gets through 100 / 1.189 us of work.
    assert hardware().beside_us(1000, 100) == pytest.approx(1000 + 100 - 100 / 1.189)


def test_free_links_cost_nothing() -> None:
    free = hardware().with_free_links()
    span = Span(size=8, stride=1)
    assert free.exchange_us(span, 1e12) < 1e-9
    assert (free.message_us(span), free.host_us(span)) == (0, 0)

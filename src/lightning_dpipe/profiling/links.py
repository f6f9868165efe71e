"""Latency and bandwidth of messages and of the gradient sum.

In:     a transport between ranks, or nothing (one process). Out: (p2p, allreduce) Links.
Messages are timed as round trips, so the clock of one rank is enough and a send that returns early
hides nothing. All neighbouring pairs run at once, as in a pipeline, and the slowest counts.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_dpipe.core.profile import Link
from lightning_dpipe.core.program import Channel, Lane, Message
from lightning_dpipe.runtime.transport import Transport

SIZES_BYTES = (1 << 10, 4 << 20)
"""The two message sizes a line is drawn through: all latency, mostly bandwidth."""

LOOPBACK_LATENCY_US = 60
"""Assumed without a second process: what gloo takes on one host for a short message."""

_REPEATS = 7


def measure_links(transport: Transport, device: torch.device) -> tuple[Link, Link]:
    """Measure between the ranks of the default process group; collective over all of them.

    Returns:
        (p2p, allreduce), the same on every rank. The bytes of `allreduce` are those that a ring
        sends per rank, 2 (n - 1) / n times the gradients.
    """
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    if num_ranks == 1:
        return loopback_links()
    pairs = [(r, r + 1) for r in range(0, num_ranks - 1, 2)]
    transport.open(
        Channel(source=a, target=b, lane=Lane.PIPELINE) for p in pairs for a, b in (p, p[::-1])
    )
    peer = rank ^ 1
    p2p = _p2p(transport, device, rank, peer) if peer < num_ranks else None
    everyone: list[tuple[Link | None, Link]] = [
        (None, Link(latency_us=0, bytes_per_s=1))
    ] * num_ranks
    dist.all_gather_object(everyone, (p2p, _allreduce(device, num_ranks)))
    return slowest([x for x, _ in everyone if x]), slowest([x for _, x in everyone])


def loopback_links() -> tuple[Link, Link]:
    """Links of ranks on this host, from the speed of a memory copy.

    A message is copied into and out of the socket; a ring sum reads, adds and copies each piece.
    """
    source = torch.zeros(SIZES_BYTES[-1], dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_us = _median_us(lambda: target.copy_(source), torch.device("cpu"))
    bytes_per_s = int(SIZES_BYTES[-1] / max(copy_us, 1.0) * 1e6)
    p2p = Link(latency_us=LOOPBACK_LATENCY_US, bytes_per_s=max(1, bytes_per_s // 2))
    allreduce = Link(latency_us=4 * LOOPBACK_LATENCY_US, bytes_per_s=max(1, bytes_per_s // 8))
    return p2p, allreduce


def fit(
    small: tuple[int, float], large: tuple[int, float], host_us: tuple[float, float] = (0.0, 0.0)
) -> Link:
    """The line through two (bytes, microseconds) points; never faster than the large one alone.

    `host_us` is what each of the two messages costs its sender.
    """
    (bytes_0, us_0), (bytes_1, us_1) = small, large
    slope_us = max((us_1 - us_0) / (bytes_1 - bytes_0), us_1 / bytes_1 / 10)
    latency_us = max(0.0, us_0 - slope_us * bytes_0)
    return Link(
        latency_us=round(latency_us),
        bytes_per_s=max(1, int(1e6 / max(slope_us, 1e-9))),
        host_us=round(host_us[0]),
        host_bytes_per_s=_rate(bytes_1 - bytes_0, host_us[1] - host_us[0]),
    )


def _rate(num_bytes: int, spent_us: float) -> int:
    """Bytes a second; 0, which stands for free, when the time is too short to tell."""
    return int(num_bytes * 1e6 / spent_us) if spent_us > 1.0 else 0


def slowest(links: Sequence[Link]) -> Link:
    """The worst of each figure."""
    return Link(
        latency_us=max(x.latency_us for x in links),
        bytes_per_s=min(x.bytes_per_s for x in links),
        host_us=max(x.host_us for x in links),
        host_bytes_per_s=min((x.host_bytes_per_s for x in links if x.host_bytes_per_s), default=0),
    )


def _p2p(transport: Transport, device: torch.device, rank: int, peer: int) -> Link:
    small, large = (_ping_pong(transport, device, rank, peer, n) for n in SIZES_BYTES)
    return fit((SIZES_BYTES[0], small[0]), (SIZES_BYTES[1], large[0]), host_us=(small[1], large[1]))


def _ping_pong(
    transport: Transport, device: torch.device, rank: int, peer: int, num_bytes: int
) -> tuple[float, float]:
    """Half a round trip, and what starting a send costs the host, in microseconds."""
    out, back = (
        Message(
            channel=Channel(source=a, target=b, lane=Lane.PIPELINE),
            tag=f"ping-pong/{num_bytes}",
            shape=(num_bytes,),
            dtype="uint8",
        )
        for a, b in ((rank, peer), (peer, rank))
    )
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    landing = torch.empty_like(payload)
    host_us: list[float] = []

    def round_trip() -> None:
        arrival = transport.post(back, landing)
        if rank > peer:
            arrival.wait()
        start_ns = time.perf_counter_ns()
        sending = transport.send(out, payload)
        host_us.append((time.perf_counter_ns() - start_ns) / 1000)
        if rank < peer:
            arrival.wait()
        sending.wait()
        _finish(device)

    return _median_us(round_trip, device) / 2, statistics.median(host_us)


def _allreduce(device: torch.device, num_ranks: int) -> Link:
    points = []
    for num_bytes in SIZES_BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device)

        def reduce(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)
            _finish(device)

        wire_bytes = 2 * (num_ranks - 1) * num_bytes // num_ranks
        points.append((wire_bytes, _median_us(reduce, device)))
    return fit(points[0], points[1])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_us(work: Callable[[], object], device: torch.device) -> float:
    times_us = []
    for _ in range(_REPEATS + 2):
        _finish(device)
        start_ns = time.perf_counter_ns()
        work()
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)
    return statistics.median(times_us[2:])

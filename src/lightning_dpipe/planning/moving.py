"""Which samples are encoded by another device than the one that loaded them.

In:     a filling problem and a target end.
Out:    runs: who encodes which samples of whom.

A device whose ops leave less time until the target than its frozen work takes gives samples away,
those of its last micro-batches, to the devices with most time left. `nudged` then moves single
samples from the device that ends last to the one that ends first, or back home.
"""

from collections.abc import Iterator

from lightning_dpipe.core.fills import Run
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.placing import Placement, Problem

Counts = tuple[tuple[int, ...], ...]
"""``counts[owner][device]``: how many of an owner's samples a device encodes."""


def shared_floor_us(problem: Problem) -> int:
    """The earliest end worth a try when samples may move: critical path, or all work spread."""
    work, n = problem.work, problem.graph.num_devices
    total_us = sum(problem.loads_us) + n * work.chain_us(work.samples)
    total_us += sum(problem.deliveries.host_us(problem.at_home))
    return max(problem.path_us, -(-total_us // n), *problem.loads_us)


def runs_for(problem: Problem, target_us: int) -> tuple[Run, ...]:
    """Runs with which every device could end at the target if all its idle time were of use."""
    work, n, b = problem.work, problem.graph.num_devices, problem.work.samples
    spent_us = problem.deliveries.host_us(problem.at_home)
    room_us = [
        target_us - load_us - host_us
        for load_us, host_us in zip(problem.loads_us, spent_us, strict=True)
    ]
    counts = [[b if d == owner else 0 for d in range(n)] for owner in range(n)]
    surplus = [b - _most(work, b, room) for room in room_us]
    free_us = [
        0 if given else room - work.chain_us(b)
        for given, room in zip(surplus, room_us, strict=True)
    ]
    for owner in sorted(range(n), key=lambda d: (-surplus[d], d)):
        while surplus[owner]:
            taker = max(range(n), key=lambda d: (free_us[d], -d))
            taken = min(surplus[owner], _most(work, b, free_us[taker]))
            if not taken:
                break
            counts[owner][owner] -= taken
            counts[owner][taker] += taken
            surplus[owner] -= taken
            free_us[taker] -= work.chain_us(taken)
    return _runs(tuple(map(tuple, counts)))


def nudged(problem: Problem, placement: Placement) -> Iterator[tuple[Run, ...]]:
    """Runs with a few samples less for the device that ends last, most of them first."""
    counts = _counts(placement.runs, problem.graph.num_devices)
    ends = placement.device_end_us
    late = max(range(len(ends)), key=lambda d: (ends[d], d))
    early = min(range(len(ends)), key=lambda d: (ends[d], d))
    per_sample_us = max(1, problem.work.chain_us(problem.work.samples) // problem.work.samples)
    wanted = (ends[late] - ends[early]) // (2 * per_sample_us)
    while wanted >= 1:
        yield _runs(_moved(counts, late, early, wanted))
        wanted //= 2


def _moved(counts: Counts, late: int, early: int, wanted: int) -> Counts:
    """Move samples from one device to another: its guests from there first, then its own."""
    found = [list(row) for row in counts]
    others = [o for o in range(len(counts)) if o not in (late, early)]
    for owner in (early, late, *others):
        taken = min(wanted, found[owner][late])
        found[owner][late] -= taken
        found[owner][early] += taken
        wanted -= taken
    return tuple(map(tuple, found))


def _runs(counts: Counts) -> tuple[Run, ...]:
    """An owner keeps its first samples."""
    found = []
    for owner, row in enumerate(counts):
        first = 0
        for device in sorted(range(len(row)), key=lambda d: (d != owner, d)):
            if row[device]:
                found.append(Run(owner, device, first, first + row[device]))
                first += row[device]
    return tuple(found)


def _counts(runs: tuple[Run, ...], num_devices: int) -> Counts:
    counts = [[0] * num_devices for _ in range(num_devices)]
    for run in runs:
        counts[run.owner][run.device] += run.last - run.first
    return tuple(map(tuple, counts))


def _most(work: FrozenCosts, samples: int, room_us: int) -> int:
    """Up to `samples`: how many can be encoded in some time, taking time to grow with samples."""
    low, high = 0, samples
    while low < high:
        middle = (low + high + 1) // 2
        if work.chain_us(middle) <= room_us:
            low = middle
        else:
            high = middle - 1
    return low

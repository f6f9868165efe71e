"""Which samples of which rank make up a micro-batch, and how encoded rows are cut into messages.

A group's samples are ordered by global slot ``i * world_size + rank``, i.e. round robin over the
group's ranks, and micro-batches are contiguous in that order. So each device's share of a
micro-batch is a contiguous range of its own local batch, interleaved with the others' shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.fills import MIN_CHUNK_BYTES
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.program import Part


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Cut of one group batch: `bounds[m]` is the first sample of micro-batch m in slot order.

    `order` holds (device, local sample) for each position of the group's batch.
    """

    sizes: tuple[int, ...]
    bounds: tuple[int, ...]
    order: tuple[tuple[int, int], ...]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the group's batch."""
        return len(self.bounds) - 1

    def rows(self, microbatch: int) -> int:
        """Samples of one micro-batch."""
        return self.bounds[microbatch + 1] - self.bounds[microbatch]

    def parts(self, microbatch: int, rows: tuple[int, int]) -> tuple[Part, ...]:
        """How to put rows of a micro-batch together: runs at constant stride, one device each."""
        low, high = (self.bounds[microbatch] + row for row in rows)
        places: dict[int, list[tuple[int, int]]] = {}
        for row, (device, sample) in enumerate(self.order[low:high]):
            places.setdefault(device, []).append((row, sample))
        return tuple(p for device, at in sorted(places.items()) for p in _runs(device, at))

    def chunks(
        self, device: int, shares: Sequence[tuple[int, int]], bytes_per_sample: int
    ) -> tuple[tuple[int, int], ...]:
        """Cut a device's local samples in messages of a useful size, at micro-batch borders.

        Args:
            device: The one that encodes the samples.
            shares: The rows of each micro-batch that the reader needs.
            bytes_per_sample: Small messages are joined where their samples follow each other.
        """
        found: list[tuple[int, int]] = []
        for microbatch, rows in enumerate(shares):
            low, high = (self.bounds[microbatch] + row for row in rows)
            mine = [i for d, i in self.order[low:high] if d == device]
            if not mine:
                continue
            first, last = mine[0], mine[-1] + 1
            small = found and (found[-1][1] - found[-1][0]) * bytes_per_sample < MIN_CHUNK_BYTES
            if small and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
        return tuple(found)


def _runs(device: int, places: Sequence[tuple[int, int]]) -> list[Part]:
    """Split (row, sample) pairs, samples consecutive, where the row stride changes."""
    runs: list[list[tuple[int, int]]] = [[places[0]]]
    for before, here in pairwise(places):
        run = runs[-1]
        if len(run) == 1 or here[0] - before[0] == run[1][0] - run[0][0]:
            run.append(here)
        else:
            runs.append([here])
    return [
        Part(
            device=device,
            first=run[0][1],
            last=run[-1][1] + 1,
            start=run[0][0],
            step=run[1][0] - run[0][0] if len(run) > 1 else 1,
        )
        for run in runs
    ]


def layout(sizes: tuple[int, ...], group: Sequence[int], num_microbatches: int) -> BatchLayout:
    """Lay out one group batch.

    Args:
        sizes: Local batch size of each device.
        group: Global rank of each device; slots follow the ranks, not the devices.
        num_microbatches: Parts of `tensor_split`.

    Raises:
        PlanError: Fewer samples than micro-batches.
    """
    total = sum(sizes)
    if total < num_microbatches:
        raise PlanError(
            f"a batch of {total} samples cannot be cut into {num_microbatches} micro-batches; "
            f"use num_microbatches <= {total} or a larger batch"
        )
    by_rank = sorted(range(len(sizes)), key=lambda d: group[d])
    order = tuple((d, i) for i in range(max(sizes)) for d in by_rank if i < sizes[d])
    bounds = [0]
    for part in split_sizes(total, num_microbatches):
        bounds.append(bounds[-1] + part)
    return BatchLayout(sizes, tuple(bounds), order)

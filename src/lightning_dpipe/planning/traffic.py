"""How many bytes cross each device's links in a step of a plan.

In:     a plan and its ModelGraph. Out: one `Traffic` a device of a pipeline group.
A value goes once to each device that reads it, its gradient back along the readers
(`core/crossings`); replicas of a stage exchange the rows that they share.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dpipe.core.crossings import crossings, stage_reads
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Plan, split_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one device: activations and gradients of the largest micro-batch, rows of a batch.

    `rows_in_bytes` are encodings and batch fields that other devices deliver to it for one step,
    `rows_out_bytes` those of its own samples that it delivers.
    """

    sent_bytes: int
    received_bytes: int
    rows_out_bytes: int
    rows_in_bytes: int


def traffic(plan: Plan, graph: ModelGraph) -> tuple[Traffic, ...]:
    """Bytes that each device of a group sends and receives."""
    rows = split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches)[0]
    sent, received = [0] * plan.num_devices, [0] * plan.num_devices
    for source, target, num_bytes in _messages(plan, graph, rows):
        sent[source] += num_bytes
        received[target] += num_bytes
    out, into = [0] * plan.num_devices, [0] * plan.num_devices
    for source, target, num_bytes in _deliveries(plan, graph):
        out[source] += num_bytes
        into[target] += num_bytes
    return tuple(
        Traffic(sent_bytes=a, received_bytes=b, rows_out_bytes=c, rows_in_bytes=d)
        for a, b, c, d in zip(sent, received, out, into, strict=True)
    )


def _messages(plan: Plan, graph: ModelGraph, rows: int) -> Iterator[tuple[int, int, int]]:
    """(from device, to device, bytes) of one micro-batch, forward and back."""
    for crossing in crossings(graph, plan.stages):
        value = graph.values[crossing.value]
        hops = [(crossing.writer, crossing.readers)]
        if value.requires_grad:
            hops += [(source, (target,)) for source, target in crossing.gradient_hops]
        for source, targets in hops:
            for a in plan.stages[source].devices:
                for b in {d for t in targets for d in plan.stages[t].devices} - {a}:
                    # A device reads a value once, however many of its stages do.
                    shared = max(_shared(plan, source, a, t, b, rows) for t in targets)
                    yield a, b, shared * value.bytes_per_sample


def _shared(plan: Plan, source: int, a: int, target: int, b: int, rows: int) -> int:
    """Rows that device `a` of stage `source` and device `b` of stage `target` both work on."""
    if b not in plan.stages[target].devices:
        return 0
    first, last = _range(plan.stages[source].devices, a, rows)
    low, high = _range(plan.stages[target].devices, b, rows)
    return max(0, min(last, high) - max(first, low))


def _range(devices: Sequence[int], device: int, rows: int) -> tuple[int, int]:
    parts = split_sizes(rows, len(devices))
    at = devices.index(device)
    return sum(parts[:at]), sum(parts[: at + 1])


def _deliveries(plan: Plan, graph: ModelGraph) -> Iterator[tuple[int, int, int]]:
    """(from device, to device, bytes) of one batch's side inputs.

    Samples of a group are ordered by slot: round robin over its ranks.
    """
    by_rank = sorted(range(plan.num_devices), key=lambda d: plan.groups[0][d])
    for target in range(plan.num_devices):
        wanted: dict[int, set[int]] = {}  # value -> positions in the group's batch
        for s in plan.stages_on(target):
            mine = _positions(plan, plan.stages[s].devices, target)
            for value in stage_reads(graph, plan.stages, s):
                if value in graph.side_inputs:
                    wanted.setdefault(value, set()).update(mine)
        for value, positions in wanted.items():
            owners = Counter(by_rank[position % plan.num_devices] for position in positions)
            for source, rows in owners.items():
                if source != target:
                    yield source, target, rows * graph.values[value].bytes_per_sample


def _positions(plan: Plan, devices: Sequence[int], device: int) -> list[int]:
    """Positions in the group's batch of the rows that one replica of a stage works on."""
    found: list[int] = []
    first = 0
    for size in split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches):
        low, high = _range(devices, device, size)
        found += range(first + low, first + high)
        first += size
    return found

"""Cut a backbone into contiguous stages so that the slowest stage is as fast as possible.

In:     a Profile, the backbone, the number of stages and the samples of a micro-batch.
Out:    half-open layer ranges, one per stage. Exact dynamic programming over integer times.
Source: DiffusionPipe (arXiv 2405.01248), section 4.1. Ours differs: among the cuts with the best
        slowest stage we take the one that sends the fewest bytes over stage borders, then the one
        that cuts earliest, so that every rank derives the same answer.
"""

from collections.abc import Sequence

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.profile import Profile


def partition(
    profile: Profile, backbone: str, *, num_stages: int, samples: int
) -> tuple[tuple[int, int], ...]:
    """Cut `backbone` into `num_stages` non-empty contiguous ranges of layers.

    Args:
        profile: Costs; a layer weighs its forward plus backward time at `samples`.
        backbone: Name of the component.
        num_stages: Stages to make.
        samples: Samples of one micro-batch on one device.

    Raises:
        PlanError: There are more stages than layers, or less than one stage.
    """
    num_layers = len(profile.graph.component(backbone).layers)
    if not 1 <= num_stages <= num_layers:
        raise PlanError(
            f"{num_stages} stages cannot be cut from the {num_layers} layers of {backbone!r}; "
            f"choose 1 <= num_stages <= {num_layers}"
        )
    times_us = [
        profile.forward_us(backbone, i, i + 1, samples)
        + profile.backward_us(backbone, i, i + 1, samples)
        for i in range(num_layers)
    ]
    limit_us = slowest_stage_us(times_us, num_stages)
    return _fewest_bytes(times_us, limit_us, incoming_bytes(profile.graph, backbone), num_stages)


def slowest_stage_us(times_us: Sequence[int], num_stages: int) -> int:
    """The smallest possible time of the slowest of `num_stages` contiguous stages."""
    sums = [0]
    for time_us in times_us:
        sums.append(sums[-1] + time_us)
    num_layers = len(times_us)
    # best[j]: slowest of the stages made so far, if they hold the first j layers.
    best = sums[:]
    for stages in range(2, num_stages + 1):
        best = [
            min(
                (max(best[i], sums[j] - sums[i]) for i in range(stages - 1, j)),
                default=sums[num_layers],
            )
            for j in range(num_layers + 1)
        ]
    return best[num_layers]


def incoming_bytes(graph: ModelGraph, backbone: str) -> list[list[int]]:
    """``[start][stop]``: bytes per sample that cross into a stage of those layers, and back.

    Each value that an earlier layer wrote comes in once; its gradient returns once.
    """
    layers = graph.component(backbone).layers
    written = {v: i for i, layer in enumerate(layers) for v in layer.writes}
    last = {v for loss in graph.losses if loss.backbone == backbone for v in loss.reads}
    if graph.feedback is not None and graph.feedback.backbone == backbone:
        last.update(graph.feedback.reads)
    num_layers = len(layers)
    table = [[0] * (num_layers + 1) for _ in range(num_layers + 1)]
    for start in range(num_layers):
        seen: set[int] = set()
        total = 0
        for stop in range(start + 1, num_layers + 1):
            reads = set(layers[stop - 1].reads) | (last if stop == num_layers else set())
            for v in reads - seen:
                if written.get(v, num_layers) < start:
                    value = graph.values[v]
                    total += value.bytes_per_sample * (2 if value.requires_grad else 1)
            seen |= reads
            table[start][stop] = total
    return table


def _fewest_bytes(
    times_us: Sequence[int], limit_us: int, crossing: Sequence[Sequence[int]], num_stages: int
) -> tuple[tuple[int, int], ...]:
    """Among cuts whose stages all stay within `limit_us`: fewest bytes, then earliest cuts."""
    num_layers = len(times_us)
    # best[i] = (bytes, stops) of the best cut of layers i.. into the stages made so far.
    best: list[tuple[int, tuple[int, ...]] | None] = [None] * num_layers + [(0, ())]
    for _ in range(num_stages):
        longer: list[tuple[int, tuple[int, ...]] | None] = [None] * (num_layers + 1)
        for start in range(num_layers):
            time_us = 0
            for stop in range(start + 1, num_layers + 1):
                time_us += times_us[stop - 1]
                if time_us > limit_us:
                    break
                rest = best[stop]
                if rest is not None:
                    found = (crossing[start][stop] + rest[0], (stop, *rest[1]))
                    here = longer[start]
                    longer[start] = found if here is None else min(here, found)
        best = longer
    assert best[0] is not None, "the limit comes from a cut that exists"
    stops = best[0][1]
    return tuple(zip((0, *stops[:-1]), stops, strict=True))

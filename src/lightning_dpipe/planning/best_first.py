"""All cuts of a backbone into replicated stages, the most promising first.

In:     bounds (`bounds.ChainBounds`), one per variant of the step with its probability.
Out:    `Cut`s in ascending order of their lower bound on the expected iteration.

A* over prefixes of stages: the bound of a prefix is that of its best completion, so the first cut
that leaves the queue has the least bound of all, and a caller that stops at the first bound above
its best simulated iteration has missed nothing.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from lightning_dpipe.core.plan import Stage
from lightning_dpipe.planning.bounds import NOTHING, ChainBounds, Prefix


@dataclass(frozen=True, slots=True)
class Part:
    """Layers ``[start, stop)`` on `replicas` devices."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A chain of stages and the expected iteration that it cannot beat."""

    parts: tuple[Part, ...]
    bound_us: float


_Entry = tuple[float, int, int, tuple[Part, ...], tuple[Prefix, ...]]
"""Bound, stages still to choose, a running number, the stages chosen, what precedes the last."""

Variant = tuple[float, ChainBounds]
"""Probability of a variant of the step (with or without self-conditioning), and its bounds."""


def expected_us(variants: Sequence[Variant], num_stages: int) -> float:
    """Expected iteration that no cut into `num_stages` stages beats."""
    return sum(weight * bounds.least_us(num_stages) for weight, bounds in variants)


def cuts_by_bound(variants: Sequence[Variant], num_stages: int) -> Iterator[Cut]:
    """Yield every cut into `num_stages` stages on all devices of the cutting.

    Among equal bounds the one with more stages fixed comes first, then the one found earlier, so
    that every rank sees the same order.
    """
    ticket = count()
    queue: list[_Entry] = [(0.0, num_stages, next(ticket), (), (NOTHING,) * len(variants))]
    while queue:
        bound_us, stages, _, parts, prefixes = heapq.heappop(queue)
        if stages == 0:
            yield Cut(parts=parts, bound_us=bound_us)
            continue
        first = 0
        if parts:
            prefixes = _advanced(variants, prefixes, parts[-1], stages + 1)
            first = parts[-1].stop
        left = variants[0][1].cutting.num_devices - sum(part.replicas for part in parts)
        for replicas in variants[0][1].replica_choices(stages, left):
            bounds_us = np.zeros(variants[0][1].costs.num_layers + 1)
            for (weight, bounds), prefix in zip(variants, prefixes, strict=True):
                ends_us = bounds.extend(prefix, first, replicas, stages, left)
                bounds_us += weight * (ends_us + bounds.close_us(0))
            for stop in np.flatnonzero(np.isfinite(bounds_us)).tolist():
                added = (*parts, Part(first, stop, replicas))
                entry = (float(bounds_us[stop]), stages - 1, next(ticket), added, prefixes)
                heapq.heappush(queue, entry)


def stages_of(backbone: str, cut: Cut, bounds: ChainBounds) -> tuple[Stage, ...]:
    """The cut as stages of a plan: devices in order, recomputation where memory asks for it."""
    stages: list[Stage] = []
    device = 0
    for i, part in enumerate(cut.parts):
        table = bounds.table(part.replicas, len(cut.parts) - i)
        stages.append(
            Stage(
                backbone=backbone,
                start=part.start,
                stop=part.stop,
                devices=tuple(range(device, device + part.replicas)),
                recompute=bool(table.recompute[part.start, part.stop]),
            )
        )
        device += part.replicas
    return tuple(stages)


def _advanced(
    variants: Sequence[Variant], prefixes: Sequence[Prefix], part: Part, stages: int
) -> tuple[Prefix, ...]:
    return tuple(
        bounds.advance(prefix, part.start, part.stop, part.replicas, stages)
        for (_, bounds), prefix in zip(variants, prefixes, strict=True)
    )

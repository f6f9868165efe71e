"""All cuts of a backbone into replicated stages, the most promising first.

In:     bounds (`bounds.ChainBounds`), one per variant of the step with its probability.
Out:    `Cut`s in ascending order of their lower bound on the expected iteration.

A* over prefixes of stages: the bound of a prefix is that of its best completion, so the first cut
that leaves the queue has the least bound of all, and a caller that stops at the first bound above
its best simulated iteration has missed nothing.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from lightning_dpipe.core.plan import Stage
from lightning_dpipe.planning.bounds import NOTHING, ChainBounds, Prefix

BEAM = 3
"""Prefixes of each length that are kept once strict order has become too expensive."""


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


Entry = tuple[float, int, int, tuple[Any, ...], tuple[Any, ...]]
"""Bound, stages still to choose, a running number, the stages chosen, what precedes the last."""

Extend = Callable[[Entry, float, Iterator[int]], Iterator[Entry]]
"""A prefix, a limit, running numbers -> prefixes with one more stage whose bound is below it."""

Variant = tuple[float, ChainBounds]
"""Probability of a variant of the step (with or without self-conditioning), and its bounds."""


def expected_least_us(variants: Sequence[Variant], num_stages: int) -> float:
    """Expected iteration that no cut into `num_stages` stages beats."""
    return sum(weight * bounds.least_us(num_stages) for weight, bounds in variants)


def cuts_by_bound(
    variants: Sequence[Variant],
    num_stages: int,
    *,
    limit_us: Callable[[], float] = lambda: float("inf"),
    max_nodes: int | None = None,
) -> Iterator[Cut]:
    """Yield cuts into `num_stages` stages on all devices of the cutting.

    Among equal bounds the one with more stages fixed comes first, then the one found earlier, so
    that every rank sees the same order. Cuts whose bound reaches what `limit_us` returns may be
    left out.

    Args:
        variants: Variants of the step.
        num_stages: Stages to make.
        limit_us: Looked up whenever a prefix is extended.
        max_nodes: Prefixes to extend in strict order; None: every one, so that all cuts come.
            After that the best `BEAM` of each length are kept, and their cuts yielded with the
            bound of all that is left. A last cut without parts says that others were left out.
    """
    start = (num_stages, (NOTHING,) * len(variants))
    for bound_us, parts in by_bound(start, partial(_extended, variants), limit_us, max_nodes):
        yield Cut(parts=parts, bound_us=bound_us)


def by_bound(
    start: tuple[int, tuple[Any, ...]],
    extend: Extend,
    limit_us: Callable[[], float],
    max_nodes: int | None,
) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """Yield (bound, stages chosen) as `cuts_by_bound` does, however prefixes are extended.

    `start` is the number of stages to choose and what precedes the first one.
    """
    ticket = count()
    queue: list[Entry] = [(0.0, start[0], next(ticket), (), start[1])]
    num_nodes = 0
    while queue:
        if num_nodes == max_nodes:
            yield from _beam(extend, queue, limit_us(), ticket)
            return
        entry = heapq.heappop(queue)
        if entry[1] == 0:
            yield entry[0], entry[3]
            continue
        num_nodes += 1
        for longer in extend(entry, limit_us(), ticket):
            heapq.heappush(queue, longer)


def _beam(
    extend: Extend, queue: Sequence[Entry], limit_us: float, ticket: Iterator[int]
) -> Iterator[tuple[float, tuple[Any, ...]]]:
    """Complete the best prefixes of each length."""
    left_us = min(entry[0] for entry in queue)
    by_left: dict[int, list[Entry]] = {}
    for entry in queue:
        by_left.setdefault(entry[1], []).append(entry)
    for stages in range(max(by_left), 0, -1):
        for entry in heapq.nsmallest(BEAM, by_left.get(stages, [])):
            by_left.setdefault(stages - 1, []).extend(extend(entry, limit_us, ticket))
    for entry in heapq.nsmallest(BEAM, by_left.get(0, [])):
        yield left_us, entry[3]
    yield left_us, ()


def _extended(
    variants: Sequence[Variant], entry: Entry, limit_us: float, ticket: Iterator[int]
) -> Iterator[Entry]:
    """A prefix with each stage that may follow, if its bound is below the limit."""
    _, stages, _, parts, prefixes = entry
    first = 0
    if parts:
        prefixes = _advanced(variants, prefixes, parts[-1], stages + 1)
        first = parts[-1].stop
    left = variants[0][1].all_devices
    for part in parts:
        left = variants[0][1].behind(left, part.replicas)
    for replicas in variants[0][1].replica_choices(stages, left):
        bounds_us = np.zeros(variants[0][1].costs.num_layers + 1)
        for (weight, bounds), prefix in zip(variants, prefixes, strict=True):
            ends_us = bounds.extend(prefix, first, replicas, stages, left)
            bounds_us += weight * (ends_us + bounds.close_us(0))
        for stop in np.flatnonzero(bounds_us < limit_us).tolist():
            added = (*parts, Part(first, stop, replicas))
            yield float(bounds_us[stop]), stages - 1, next(ticket), added, prefixes


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

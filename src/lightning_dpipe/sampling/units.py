"""Units of work of a sampling run, and which rank does which stage's share of them when.

In:     steps, warm-up, patches, groups; the rank of every stage.
Out:    units in order, ops per rank, a timeline that prints itself.
Pure: a plan can be looked at without a model.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One patch (None: the whole image) of a group of images at one step of the solver."""

    index: int
    step: int
    group: int
    patch: int | None

    @property
    def opens_step(self) -> bool:
        """Whether it is its group's first of the step: it brings conditions and text along."""
        return self.patch is None or self.patch == 0

    @property
    def opens_call(self) -> bool:
        """Whether it is its group's first of all."""
        return self.step == 0 and self.opens_step

    def __str__(self) -> str:
        return f"step {self.step} group {self.group} " + (
            "whole" if self.patch is None else f"patch {self.patch}"
        )


@dataclass(frozen=True, slots=True)
class Op:
    """What a stage does for a unit."""

    unit: Unit
    stage: int


def list_units(
    *, num_steps: int, num_patches: int | None, warmup: int, groups: int
) -> tuple[Unit, ...]:
    """All units in the order in which every stage takes them.

    Args:
        num_steps: Of the solver.
        num_patches: None: whole images in all steps (exact).
        warmup: Steps with whole images before patches begin; more than `num_steps` means all.
        groups: Of images, interleaved within a step.
    """
    found: list[Unit] = []
    for step in range(num_steps):
        whole = num_patches is None or step < warmup
        for group in range(groups):
            for patch in (None,) if whole else range(num_patches or 0):
                found.append(Unit(index=len(found), step=step, group=group, patch=patch))
    return tuple(found)


def successors(units: Sequence[Unit]) -> dict[int, tuple[Unit, ...]]:
    """By unit index: the next step's units whose input this one completes."""
    places = {(u.step, u.group, u.patch): u for u in units}
    found: dict[int, tuple[Unit, ...]] = {u.index: () for u in units}
    for unit in units:
        before = places.get((unit.step - 1, unit.group, unit.patch))
        before = before or places.get((unit.step - 1, unit.group, None))
        if before is not None:
            found[before.index] = (*found[before.index], unit)
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """An op with its predicted time."""

    op: Op
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class UnitTimeline:
    """All ops in the order of their start; times in units of one stage's time for a whole image."""

    spans: tuple[Span, ...]

    @property
    def end(self) -> float:
        """When the last op is done."""
        return max((span.end for span in self.spans), default=0.0)

    def orders(self) -> dict[int, tuple[Op, ...]]:
        """Each rank's ops, in order. All ranks derive the same."""
        found: dict[int, list[Op]] = {}
        for span in self.spans:
            found.setdefault(span.rank, []).append(span.op)
        return {rank: tuple(ops) for rank, ops in found.items()}

    def useful_ratio(self) -> float:
        """Work divided by ranks times duration, in [0, 1]."""
        work = sum(span.end - span.start for span in self.spans)
        return work / (len({span.rank for span in self.spans}) * self.end) if self.end else 0.0

    def chart(self, width: int = 100) -> str:
        """One row a rank: the patch (W: whole image, letters beside groups > 0), ``.`` idle."""
        lines = []
        scale = width / self.end if self.end else 0.0
        for rank in sorted({span.rank for span in self.spans}):
            row = ["."] * width
            for span in self.spans:
                if span.rank == rank:
                    first, last = round(span.start * scale), round(span.end * scale)
                    row[first:last] = _mark(span.op.unit) * (last - first)
            lines.append(f"rank {rank} |{''.join(row)}|")
        return "\n".join(lines)


def _mark(unit: Unit) -> str:
    if unit.patch is None:
        return "W" if unit.group == 0 else chr(ord("a") + (unit.group - 1) % 26)
    return str(unit.patch % 10)


def timeline(
    units: Sequence[Unit],
    owners: Sequence[int],
    *,
    share: Mapping[int | None, float] | None = None,
) -> UnitTimeline:
    """Let every rank take the earliest of its ops that can start, as in a run without delays.

    An op needs its stage's op before (keys and values are written in order) and the same unit's
    op of the stage before; the first stage needs what the last one made of the unit's rows in the
    step before. Every op depends on earlier units or stages only, so that walking the orders over
    channels that keep their order cannot deadlock.

    Args:
        units: From `list_units`.
        owners: Rank of every stage.
        share: By patch, its share of a whole image's time; None: all patches alike.
    """
    last = len(owners) - 1
    num_patches = 1 + max((u.patch for u in units if u.patch is not None), default=0)
    following = successors(units)
    next_of_group = {a.index: b.index for a, b in pairwise(units)}
    waits = {(u.index, s): 0 for u in units for s in range(len(owners))}
    enables: dict[tuple[int, int], list[tuple[int, int]]] = {key: [] for key in waits}
    for unit in units:
        for stage in range(len(owners)):
            targets = [(unit.index, stage + 1)] if stage < last else []
            if unit.index in next_of_group:
                targets.append((next_of_group[unit.index], stage))
            if stage == last:
                targets += [(u.index, 0) for u in following[unit.index]]
            for target in targets:
                enables[unit.index, stage].append(target)
                waits[target] += 1
    free = dict.fromkeys(owners, 0.0)
    ready = [(0.0, index, stage) for (index, stage), count in waits.items() if count == 0]
    ready_at = dict.fromkeys(waits, 0.0)
    heapq.heapify(ready)
    spans: list[Span] = []
    while ready:
        at, index, stage = heapq.heappop(ready)
        rank = owners[stage]
        if at < free[rank]:  # its rank is busy: it comes up again, behind what is due before
            heapq.heappush(ready, (free[rank], index, stage))
            continue
        unit = units[index]
        cost = 1.0 if unit.patch is None else (share or {}).get(unit.patch, 1.0 / num_patches)
        free[rank] = at + cost
        spans.append(Span(Op(unit, stage), rank, at, at + cost))
        for target in enables[index, stage]:
            waits[target] -= 1
            ready_at[target] = max(ready_at[target], at + cost)
            if waits[target] == 0:
                heapq.heappush(ready, (ready_at[target], *target))
    return UnitTimeline(tuple(spans))

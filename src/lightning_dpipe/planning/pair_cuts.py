"""Several backbones piped over the same devices in two directions: all cuts, the best first.

In:     bounds (`pair_bounds`), one per variant of the step with its probability.
Out:    `PairCut`s in ascending order of their lower bound, and the stages of a plan.
Source: DiffusionPipe (arXiv 2405.01248), section 4, for cascaded models. Ours differs: cuts of both
        directions and the devices of each position are chosen together by what bounds the simulated
        iteration, not by T_max (which is `pair_dp`).

Every position holds one stage of each backbone: ascending layers on ascending positions for the
backbones piped down, on descending positions for those piped up.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.best_first import Entry, by_bound
from lightning_dpipe.planning.directions import Directions
from lightning_dpipe.planning.opposite import with_lengths
from lightning_dpipe.planning.pair_bounds import NO_POSITION, PairBounds
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.stage_costs import Cutting
from lightning_dpipe.simulation.memory import peak_bytes

PairVariant = tuple[float, PairBounds]
"""Probability of a variant of the step, and its bounds."""


@dataclass(frozen=True, slots=True)
class Position:
    """Borders ``[start, stop)`` of both directions on `replicas` devices."""

    down: tuple[int, int]
    up: tuple[int, int]
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCut:
    """Positions from the first device on, and the expected iteration they cannot beat."""

    positions: tuple[Position, ...]
    bound_us: float


def least_pair_us(variants: Sequence[PairVariant], num_positions: int) -> float:
    """Expected iteration that no pipeline of so many positions beats; found at once."""
    return sum(weight * bounds.least_us(num_positions) for weight, bounds in variants)


def pair_cuts_by_bound(
    variants: Sequence[PairVariant],
    num_positions: int,
    *,
    limit_us: Callable[[], float] = lambda: float("inf"),
    max_nodes: int | None = None,
) -> Iterator[PairCut]:
    """As `best_first.cuts_by_bound`, for positions instead of stages."""
    start = (num_positions, (NO_POSITION,) * len(variants))
    extend = partial(_extended, variants, max_nodes)
    for bound_us, parts in by_bound(start, extend, limit_us, max_nodes):
        yield PairCut(positions=parts, bound_us=bound_us)


def _extended(
    variants: Sequence[PairVariant],
    most: int | None,
    entry: Entry,
    limit_us: float,
    ticket: Iterator[int],
) -> Iterator[Entry]:
    """A prefix with each position that may follow, if its bound is below the limit.

    With `most` only so many of each number of replicas: who looks at no more prefixes than that
    leaves one of them in the queue, whose bound is not above those of the ones left out.
    """
    _, num_positions, _, chosen, prefixes = entry
    bounds = variants[0][1]
    a, b = 0, bounds.directions.up.num_layers
    if chosen:
        last = chosen[-1]
        prefixes = tuple(
            each.advance(prefix, last.down, last.up, last.replicas, num_positions + 1)
            for (_, each), prefix in zip(variants, prefixes, strict=True)
        )
        a, b = last.down[1], last.up[0]
    left = bounds.cutting.num_devices - sum(position.replicas for position in chosen)
    for replicas in bounds.replica_choices(num_positions, left):
        bounds_us = np.zeros(bounds.shape)
        for (weight, each), prefix in zip(variants, prefixes, strict=True):
            bounds_us += weight * each.extend(prefix, a, b, replicas, num_positions, left)
        # What holds for the prefix holds for all that it may become.
        bounds_us = np.maximum(bounds_us, entry[0])
        found = np.argwhere(bounds_us < limit_us)
        if most is not None and len(found) > most:
            order = np.argsort(bounds_us[found[:, 0], found[:, 1]], kind="stable")
            found = found[order[:most]]
        for stop, start in found.tolist():
            added = (*chosen, Position((a, stop), (start, b), replicas))
            yield float(bounds_us[stop, start]), num_positions - 1, next(ticket), added, prefixes


def pair_chains(
    variants: Sequence[PairVariant],
    num_positions: int,
    max_nodes: int | None,
    limit_us: Callable[[], float],
) -> Iterator[tuple[float, tuple[Stage, ...]]]:
    """Bounds and stages of the cuts that fit into memory; no stages: others were left out."""
    bounds = variants[0][1]
    profile, cutting = bounds.directions.profile, bounds.cutting
    for cut in pair_cuts_by_bound(variants, num_positions, limit_us=limit_us, max_nodes=max_nodes):
        if not cut.positions:
            yield cut.bound_us, ()
            continue
        stages = pair_stages(profile, bounds.directions, cut.positions)
        for found in fitting(profile, cutting, stages):
            yield cut.bound_us, found


def pair_stages(
    profile: Profile, directions: Directions, positions: Sequence[Position]
) -> tuple[Stage, ...]:
    """The positions as stages of a plan: one backbone after the other, each in layer order."""
    found: dict[str, list[Stage]] = {c.name: [] for c in profile.graph.backbones}
    device = 0
    for position in positions:
        devices = tuple(range(device, device + position.replicas))
        device += position.replicas
        sides = ((directions.down, position.down), (directions.up, position.up))
        for direction, borders in sides:
            for backbone, start, stop in direction.layers(*borders):
                stage = Stage(backbone=backbone, start=start, stop=stop, devices=devices)
                found[backbone].append(stage)
    return tuple(
        stage
        for stages in found.values()
        for stage in sorted(stages, key=lambda stage: stage.start)
    )


def fitting(
    profile: Profile, cutting: Cutting, stages: tuple[Stage, ...]
) -> Iterator[tuple[Stage, ...]]:
    """The stages with as little recomputation as memory asks for; nothing if they do not fit.

    Where either of two stages of a device might recompute, both ways come.
    """
    memory = cutting.memory_bytes
    if memory is None:
        yield stages
        return
    positions: dict[tuple[int, ...], list[int]] = {}
    for i, stage in enumerate(stages):
        positions.setdefault(stage.devices, []).append(i)
    # The order of ops does not depend on who recomputes (`in_order`), so what a device holds
    # depends on its own stages only: one look per pattern, not per product.
    peaks = {}
    for pattern in itertools.product((False, True), repeat=len(profile.graph.backbones)):
        again = {i for at in positions.values() for i, on in zip(at, pattern, strict=True) if on}
        plan = _plan(profile, cutting, _recomputing(stages, again))
        peaks[pattern] = peak_bytes(plan, schedule_of(plan), profile)
    choices = []
    for devices, at in positions.items():
        fits = [p for p, peak in peaks.items() if max(peak[d] for d in devices) <= memory]
        least = [p for p in fits if not any(_less(other, p) for other in fits)]
        choices.append([[i for i, on in zip(at, p, strict=True) if on] for p in least])
    for chosen in itertools.product(*choices):
        yield _recomputing(stages, set(itertools.chain.from_iterable(chosen)))


def _plan(profile: Profile, cutting: Cutting, stages: tuple[Stage, ...]) -> Plan:
    """The stages as a plan of one group: what one schedules."""
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=default_groups(cutting.num_devices, cutting.num_devices),
        stages=stages,
        num_microbatches=cutting.num_microbatches,
        batch_size=sum(cutting.sizes) // cutting.num_devices,
        schedule=cutting.schedule,
    )
    return in_order(plan, profile)


def in_order(plan: Plan, profile: Profile) -> Plan:
    """`with_lengths` as if no stage recomputed: who does is chosen after the order of ops."""
    plain = replace(plan, stages=_recomputing(plan.stages, set()))
    return replace(with_lengths(plain, profile), stages=plan.stages)


def _recomputing(stages: Sequence[Stage], again: set[int]) -> tuple[Stage, ...]:
    return tuple(replace(stage, recompute=i in again) for i, stage in enumerate(stages))


def _less(one: tuple[bool, ...], other: tuple[bool, ...]) -> bool:
    """Whether one pattern recomputes part of what the other does, and no more."""
    return one != other and all(b or not a for a, b in zip(one, other, strict=True))

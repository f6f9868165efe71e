"""Correct a profile by what a run measured.

In:     a Profile, the plan that ran, measured timelines of its steps.
Out:    the profile with the layer times of each stage, and of each frozen layer, scaled so that its
        ops take as long as they did on average (a fill of several layers says only what they take
        together): layers timed alone and layers timed in a pipeline
        differ by caches, memory bandwidth and clock speed. Cuts keep their balance inside a stage.

Averages, not medians: an iteration is a sum of many ops, and where lengths have a long tail, a
sum of medians falls short of it.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from lightning_dpipe.core.fleet import fleet, kinds_in_groups
from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Plan, Stage, split_sizes
from lightning_dpipe.core.profile import ComponentCost, Profile
from lightning_dpipe.core.timeline import Activity, FrozenWork, Span, Timeline

K = TypeVar("K", bound=Hashable)


def calibrate(profile: Profile, plan: Plan, timelines: Sequence[Timeline]) -> Profile:
    """Scale the times of what the timelines show; what they do not show keeps its times.

    Devices of several kinds learn from the spans of their own kind only.

    Args:
        profile: Times to correct.
        plan: What ran, at its full batch size.
        timelines: Measured steps; more of them give steadier averages.
    """
    if profile.kinds:
        kinds = kinds_in_groups(plan, profile)
        learnt = []
        for kind in range(1 + len(profile.others)):
            own = [
                replace(t, spans=tuple(s for s in t.spans if kinds[s.device] == kind))
                for t in timelines
            ]
            learnt.append(calibrate(profile.of_kind(kind), plan, own))
        overhead_us = _overhead_us(profile, timelines)
        return replace(fleet(learnt, profile.kinds), overhead_us=overhead_us)
    costs = {cost.name: cost for cost in profile.costs}
    for index, stage in enumerate(plan.stages):
        forward = _stage_factor(profile, plan, index, (OpKind.F, OpKind.S), timelines)
        backward = _stage_factor(profile, plan, index, (OpKind.B,), timelines)
        costs[stage.backbone] = scaled(
            costs[stage.backbone], stage.start, stage.stop, forward, backward
        )
        update = _optimizer_factor(profile, plan, index, timelines)
        costs[stage.backbone] = _with_optimizer(costs[stage.backbone], stage, update)
    for (name, layer), factor in _frozen_factors(profile, timelines).items():
        costs[name] = scaled(costs[name], layer, layer + 1, factor, 1.0)
    return replace(
        profile,
        costs=tuple(costs[cost.name] for cost in profile.costs),
        overhead_us=_overhead_us(profile, timelines),
    )


def _stage_factor(
    profile: Profile,
    plan: Plan,
    index: int,
    kinds: tuple[OpKind, ...],
    timelines: Sequence[Timeline],
) -> float:
    """Measured over profiled time of a stage's ops, 1 if none ran."""
    stage = plan.stages[index]
    rows = split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches)
    cost = profile.backward_us if OpKind.B in kinds else profile.forward_us
    measured = profiled = 0.0
    spans = (s for t in timelines for s in t.spans)
    for (device, op), lengths in _by_key(spans, lambda s: (s.device, s.op)).items():
        if op is not None and op.stage == index and op.kind in kinds:
            first, last = stage.rows_on(device, rows[op.microbatch])
            measured += typical(lengths)
            profiled += cost(stage.backbone, stage.start, stage.stop, last - first)
    return measured / profiled if profiled else 1.0


def _frozen_factors(
    profile: Profile, timelines: Sequence[Timeline]
) -> dict[tuple[str, int], float]:
    """Measured over profiled time of all pieces with each frozen layer, by (component, layer)."""
    spans = (s for t in timelines for s in t.spans if s.activity is Activity.FROZEN)
    measured: dict[tuple[str, int], float] = defaultdict(float)
    profiled: dict[tuple[str, int], float] = defaultdict(float)
    for (_, label), lengths in _by_key(spans, lambda s: (s.device, s.label)).items():
        work = FrozenWork.parse(label)
        took_us = max(0, typical(lengths) - profile.fill_us)
        expected_us = profile.forward_us(
            work.component, work.start, work.stop, work.last - work.first
        )
        for layer in range(work.start, work.stop):
            measured[work.component, layer] += took_us
            profiled[work.component, layer] += expected_us
    return {key: measured[key] / profiled[key] for key in measured if profiled[key]}


def _optimizer_factor(
    profile: Profile, plan: Plan, index: int, timelines: Sequence[Timeline]
) -> float:
    """Measured over profiled optimizer time of the device that holds a stage, 1 if unknown."""
    # Replicas of a stage step alike; of several kinds only some are in these timelines.
    device = next(
        (
            d
            for d in plan.stages[index].devices
            if any(_updates(s, d) for t in timelines for s in t.spans)
        ),
        plan.stages[index].devices[0],
    )
    steps = [s.length_us for t in timelines for s in t.spans if _updates(s, device)]
    profiled = sum(
        profile.optimizer_us(s.backbone, s.start, s.stop)
        for s in map(plan.stages.__getitem__, plan.stages_on(device))
    )
    return typical(steps) / profiled if steps and profiled else 1.0


def _updates(span: Span, device: int) -> bool:
    return span.activity is Activity.OPTIMIZER and span.device == device


def typical(lengths_us: Sequence[int]) -> float:
    """Mean, where what is beyond twice the median (a hiccup of the host) counts as that."""
    most_us = 2 * statistics.median(lengths_us)
    return statistics.fmean(min(us, most_us) for us in lengths_us)


def _overhead_us(profile: Profile, timelines: Sequence[Timeline]) -> int:
    """What a step takes after the last span of any device."""
    tails = [t.end_us - max(s.end_us for s in t.spans) for t in timelines if t.spans]
    return round(statistics.median(tails)) if tails else profile.overhead_us


def _by_key(spans: Iterable[Span], key: Callable[[Span], K]) -> dict[K, list[int]]:
    groups: dict[K, list[int]] = defaultdict(list)
    for span in spans:
        groups[key(span)].append(span.length_us)
    return groups


def _with_optimizer(cost: ComponentCost, stage: Stage, factor: float) -> ComponentCost:
    layers = [
        replace(layer, optimizer_us=round(layer.optimizer_us * factor))
        if stage.start <= index < stage.stop
        else layer
        for index, layer in enumerate(cost.layers)
    ]
    return replace(cost, layers=tuple(layers))


def scaled(
    cost: ComponentCost, start: int, stop: int, forward: float, backward: float
) -> ComponentCost:
    """Multiply the times of layers ``[start, stop)``."""

    def times(values: tuple[int, ...], factor: float) -> tuple[int, ...]:
        return tuple(round(v * factor) for v in values)

    layers = [
        replace(
            layer,
            forward_us=times(layer.forward_us, forward),
            backward_us=times(layer.backward_us, backward),
            input_grad_us=times(layer.input_grad_us, backward),
        )
        if start <= index < stop
        else layer
        for index, layer in enumerate(cost.layers)
    ]
    return replace(cost, layers=tuple(layers))

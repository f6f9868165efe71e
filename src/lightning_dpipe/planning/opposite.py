"""Several backbones on one pipeline: every one cut over all devices, in alternating directions.

In:     a Profile, the number of stages of each backbone, and cuts if they are given.
Out:    stages of all backbones (see `Plan`) and the relative op lengths that order them.
Source: DiffusionPipe (arXiv 2405.01248), section 4.3. Ours differs: each backbone is cut on its
        own, so that its slowest stage is as fast as possible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Plan, Stage, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.partition import partition

Cuts = Sequence[int] | Mapping[str, Sequence[int]]
"""First layer of every stage but the first: of the only backbone, or by backbone."""

Ranges = tuple[tuple[int, int], ...]
"""Half-open layer ranges of a backbone's stages."""


def opposite_stages(
    profile: Profile,
    *,
    num_stages: int,
    samples: int,
    cuts: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Stage, ...]:
    """Cut every backbone into `num_stages` stages: the first goes down the devices, the next up.

    Args:
        profile: Costs.
        num_stages: Stages of each backbone, one a device.
        samples: Samples of one micro-batch.
        cuts: First layer of every stage but the first, by backbone; by default the fastest slowest
            stage of each.

    Raises:
        PlanError: The numbers do not fit a backbone, or `cuts` name other backbones.
    """
    names = [c.name for c in profile.graph.backbones]
    if cuts is not None and set(cuts) != set(names):
        raise PlanError(
            f"cuts are given for {', '.join(sorted(cuts))}, the backbones are "
            f"{', '.join(names)}; give the cuts of each one"
        )
    stages: list[Stage] = []
    for k, name in enumerate(names):
        if cuts is None:
            ranges = partition(profile, name, num_stages=num_stages, samples=samples)
        else:
            num_layers = len(profile.graph.component(name).layers)
            ranges = ranges_of(cuts[name], num_stages, num_layers)
        homes = range(num_stages) if k % 2 == 0 else range(num_stages - 1, -1, -1)
        stages += [
            Stage(backbone=name, start=start, stop=stop, devices=(home,))
            for home, (start, stop) in zip(homes, ranges, strict=True)
        ]
    return tuple(stages)


def with_lengths(plan: Plan, profile: Profile) -> Plan:
    """The plan with what the order of several backbones' ops depends on, from the profile."""
    if len(plan.chains) == 1:
        return plan
    rows = max(split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches))
    lengths = []
    for s in plan.stages:
        span = (s.backbone, s.start, s.stop, -(-rows // len(s.devices)))
        forward_us = profile.forward_us(*span)
        again_us = forward_us if s.recompute else 0
        lengths.append((forward_us, again_us + profile.backward_us(*span)))
    feedback = profile.graph.feedback
    conditioned = None if feedback is None else feedback.backbone
    return replace(plan, lengths=tuple(lengths), conditioned=conditioned)


def num_stages_of(cuts: Cuts) -> int:
    """Stages that cuts make of each backbone.

    Raises:
        PlanError: The backbones would have different numbers of stages.
    """
    every = cuts.values() if isinstance(cuts, Mapping) else (cuts,)
    counts = {len(own) + 1 for own in every}
    if len(counts) != 1:
        raise PlanError(
            f"cuts make {sorted(counts)} stages of the backbones; every backbone has as many "
            "stages as the pipeline has devices"
        )
    return counts.pop()


def ranges_of(cuts: Sequence[int], num_stages: int, num_layers: int) -> Ranges:
    """Half-open layer ranges between explicit borders.

    Raises:
        PlanError: A stage would be empty, or there are more or fewer of them.
    """
    ranges = tuple(pairwise((0, *cuts, num_layers)))
    if len(ranges) != num_stages or any(start >= stop for start, stop in ranges):
        raise PlanError(
            f"cuts={tuple(cuts)} do not cut {num_layers} layers into {num_stages} stages; "
            f"give {num_stages - 1} ascending layer numbers between 1 and {num_layers - 1}"
        )
    return ranges

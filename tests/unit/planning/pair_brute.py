"""Every way to pipe several backbones in two directions: the oracle of the pair tests."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from brute import random_profile

from lightning_dpipe.core.graph import FeedbackNode, LossNode, ModelGraph
from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.bidirectional import Position, ordered, pair_stages
from lightning_dpipe.planning.directions import Directions


def joined(profiles: Sequence[Profile]) -> Profile:
    """One model of several backbones ``net0, net1, ...``; links and devices are the first's."""
    values, inputs, frozen, backbones, losses, costs = [], [], [], [], [], []
    feedback = None
    for k, profile in enumerate(profiles):
        graph, shift, name = profile.graph, len(values), f"net{k}"
        values += [replace(v, name=f"{v.name}.{k}") for v in graph.values]
        inputs += [v + shift for v in graph.inputs]
        for component in graph.components:
            layers = tuple(
                replace(
                    layer,
                    reads=tuple(v + shift for v in layer.reads),
                    writes=tuple(v + shift for v in layer.writes),
                )
                for layer in component.layers
            )
            own = name if component.name == "net" else f"{component.name}{k}"
            found = replace(component, name=own, layers=layers)
            (backbones if component.name == "net" else frozen).append(found)
            costs.append(replace(profile.component(component.name), name=own))
        losses += [
            LossNode(backbone=name, reads=tuple(v + shift for v in loss.reads))
            for loss in graph.losses
        ]
        if graph.feedback is not None:
            feedback = FeedbackNode(
                backbone=name,
                reads=tuple(v + shift for v in graph.feedback.reads),
                writes=graph.feedback.writes + shift,
            )
    graph = ModelGraph(
        values=tuple(values),
        inputs=tuple(inputs),
        components=(*frozen, *backbones),
        losses=tuple(losses),
        feedback=feedback,
    )
    return replace(profiles[0], graph=graph, costs=tuple(costs))


def random_pair(
    rng: random.Random, *num_layers: int, frozen: bool = False, feedback: bool = False
) -> Profile:
    """Uneven backbones of so many layers; the first one may feed back."""
    return joined(
        [
            random_profile(rng, n, frozen=frozen and k == 0, feedback=feedback and k == 0)
            for k, n in enumerate(num_layers)
        ]
    )


def all_positions(
    num_down: int, num_up: int, num_positions: int, num_devices: int
) -> Iterator[tuple[Position, ...]]:
    """All cuts of both directions and all replications, on all devices."""
    for down, up, devices in itertools.product(
        _ranges(num_down, num_positions),
        _ranges(num_up, num_positions),
        _ranges(num_devices, num_positions),
    ):
        yield tuple(
            Position(d, u, high - low)
            for d, u, (low, high) in zip(down, reversed(up), devices, strict=True)
        )


def pair_plan(
    profile: Profile,
    directions: Directions,
    positions: Sequence[Position],
    *,
    num_groups: int,
    batch_size: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    stages: tuple[Stage, ...] | None = None,
) -> Plan:
    """A plan without fills."""
    num_devices = sum(position.replicas for position in positions)
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=default_groups(num_groups * num_devices, num_devices),
        stages=pair_stages(profile, directions, positions) if stages is None else stages,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        schedule=schedule,
    )
    return ordered(plan, profile)


def _ranges(total: int, parts: int) -> list[tuple[tuple[int, int], ...]]:
    return [
        tuple(itertools.pairwise((0, *inner, total)))
        for inner in itertools.combinations(range(1, total), parts - 1)
    ]

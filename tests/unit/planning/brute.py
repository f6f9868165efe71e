"""Every way to cut a backbone into replicated stages: the oracle of the partition tests."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import Link, Profile
from synthetic import FrozenChain, model_profile


def all_stages(num_layers: int, num_stages: int, num_devices: int) -> Iterator[tuple[Stage, ...]]:
    """All cuts and all replications of `num_layers` layers on all devices."""
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        ranges = tuple(itertools.pairwise((0, *inner, num_layers)))
        for borders in itertools.combinations(range(1, num_devices), num_stages - 1):
            devices = tuple(itertools.pairwise((0, *borders, num_devices)))
            yield tuple(
                Stage(backbone="net", start=a, stop=b, devices=tuple(range(c, d)))
                for (a, b), (c, d) in zip(ranges, devices, strict=True)
            )


def all_recomputes(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Each stage with and without recomputation."""
    for choice in itertools.product((False, True), repeat=len(stages)):
        yield tuple(replace(s, recompute=r) for s, r in zip(stages, choice, strict=True))


def plan_with(
    stages: tuple[Stage, ...],
    *,
    num_groups: int,
    batch_size: int,
    num_microbatches: int,
    schedule: str = "1f1b",
) -> Plan:
    """A plan without fills for the given stages."""
    num_devices = 1 + max(d for stage in stages for d in stage.devices)
    return Plan(
        graph_digest="",
        profile_digest="",
        groups=default_groups(num_groups * num_devices, num_devices),
        stages=stages,
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        schedule=schedule,
    )


def random_profile(rng: random.Random, num_layers: int, *, frozen: bool, feedback: bool) -> Profile:
    """Uneven layers with skips, costly links, gradients worth hiding."""
    pairs = list(itertools.combinations(range(num_layers), 2))
    chains = (FrozenChain(name="vae", forward_us=(rng.randint(1, 90), rng.randint(1, 90))),)
    return model_profile(
        [rng.randint(1, 90) for _ in range(num_layers)],
        [rng.randint(0, 180) for _ in range(num_layers)],
        skips=rng.sample(pairs, min(2, len(pairs))),
        frozen=chains if frozen else (),
        feedback=feedback,
        width=rng.choice([0, 64]),
        trained_bytes=rng.choice([1000, 20000]),
        optimizer_us=rng.choice([0, 30]),
        p2p=Link(latency_us=rng.choice([0, 40]), bytes_per_s=10**7, host_us=rng.choice([0, 3])),
        allreduce=Link(latency_us=20, bytes_per_s=10**8),
        overhead_us=100,
    )

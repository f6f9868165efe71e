"""Every way to give stages devices of several kinds and rows: the oracle of the mixed search."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from brute import random_profile

from lightning_dpipe.core.fleet import fleet
from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.profile import ComponentCost, Profile


def slowed(profile: Profile, factor: float, *, rng: random.Random | None = None) -> Profile:
    """The same model on a device that takes `factor` as long; with `rng` uneven over layers."""

    def cost(component: ComponentCost) -> ComponentCost:
        layers = []
        for layer in component.layers:
            by = factor * (1.0 if rng is None else rng.uniform(0.7, 1.4))
            layers.append(
                replace(
                    layer,
                    forward_us=tuple(round(by * t) for t in layer.forward_us),
                    backward_us=tuple(round(by * t) for t in layer.backward_us),
                    input_grad_us=tuple(round(by * t) for t in layer.input_grad_us),
                    optimizer_us=round(by * layer.optimizer_us),
                )
            )
        return replace(component, layers=tuple(layers))

    return replace(profile, costs=tuple(map(cost, profile.costs)), device=f"{factor}x slower")


def random_fleet(
    rng: random.Random, num_layers: int, kinds: Sequence[int], *, frozen: bool, feedback: bool
) -> Profile:
    """Two kinds of devices whose speed differs by layer."""
    base = random_profile(rng, num_layers, frozen=frozen, feedback=feedback)
    return fleet([base, slowed(base, rng.choice([1.3, 2.0, 3.1]), rng=rng)], kinds)


def partitions(counts: tuple[int, ...], num_stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to hand out all devices, of each kind so many, to stages of at least one."""
    vectors = [v for v in itertools.product(*(range(n + 1) for n in counts)) if any(v)]
    for chosen in itertools.product(vectors, repeat=num_stages):
        if tuple(map(sum, zip(*chosen, strict=True))) == counts:
            yield chosen


def share_choices(vector: tuple[int, ...], rows: int) -> Iterator[tuple[int, ...]]:
    """Every share of `rows` by kind, as even as can be among devices of one kind."""
    present = [(kind, n) for kind, n in enumerate(vector) if n]
    if len(present) == 1:
        yield ()
        return
    for split in itertools.product(range(1, rows + 1), repeat=len(present)):
        if sum(split) == rows and all(x >= n for x, (_, n) in zip(split, present, strict=True)):
            yield tuple(
                x // n + (i < x % n)
                for x, (_, n) in zip(split, present, strict=True)
                for i in range(n)
            )


def all_mixed_plans(
    profile: Profile, *, num_groups: int, num_stages: int, batch_size: int, num_microbatches: int
) -> Iterator[Plan]:
    """All cuts, all assignments of kinds, all shares; groups of equal devices."""
    num_layers = len(profile.graph.component("net").layers)
    world = Counter(profile.kinds)
    counts = tuple(world[kind] // num_groups for kind in sorted(world))
    total = batch_size * sum(counts)
    rows = -(-total // num_microbatches)
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        ranges = tuple(itertools.pairwise((0, *inner, num_layers)))
        for vectors in partitions(counts, num_stages):
            if max(map(sum, vectors)) > total // num_microbatches:
                continue
            order = [k for v in vectors for k, n in enumerate(v) for _ in range(n)]
            groups = _groups(order, profile.kinds, num_groups)
            ends = list(itertools.accumulate(map(sum, vectors)))
            for shares in itertools.product(*(list(share_choices(v, rows)) for v in vectors)):
                stages = tuple(
                    Stage(
                        backbone="net", start=a, stop=b, devices=tuple(range(end - sum(v), end)),
                        shares=s,
                    )
                    for (a, b), v, end, s in zip(ranges, vectors, ends, shares, strict=True)
                )  # fmt: skip
                yield Plan(
                    graph_digest="", profile_digest="", groups=groups, stages=stages,
                    num_microbatches=num_microbatches, batch_size=batch_size, schedule="1f1b",
                )  # fmt: skip


def _groups(
    order: Sequence[int], kinds: Sequence[int], num_groups: int
) -> tuple[tuple[int, ...], ...]:
    free = {kind: [r for r, k in enumerate(kinds) if k == kind] for kind in set(kinds)}
    return tuple(tuple(free[kind].pop(0) for kind in order) for _ in range(num_groups))

"""Enumeration of cuts in the order of their bounds."""

import random
from itertools import pairwise

import pytest
from brute import all_stages, random_profile

from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.planning.best_first import Cut, Variant, cuts_by_bound, expected_least_us
from lightning_dpipe.planning.bounds import ChainBounds
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting


def variants(seed: int, num_layers: int, num_devices: int) -> tuple[Variant, ...]:
    costs = BackboneCosts(
        random_profile(random.Random(seed), num_layers, frozen=False, feedback=True), "net"
    )
    return tuple(
        (
            0.5,
            ChainBounds(
                costs,
                Cutting(
                    sizes=split_sizes(24, 3),
                    num_devices=num_devices,
                    num_groups=2,
                    schedule="1f1b",
                    self_conditioned=conditioned,
                ),
                max_stages=3,
                frozen_us=70,
                hidden=True,
            ),
        )
        for conditioned in (False, True)
    )


def key(cut: Cut) -> tuple[tuple[int, int, int], ...]:
    return tuple((p.start, p.stop, p.replicas) for p in cut.parts)


@pytest.mark.parametrize("seed", range(4))
def test_every_cut_comes_once_in_ascending_order_of_bounds(seed: int) -> None:
    found = list(cuts_by_bound(variants(seed, 7, 4), 3))
    wanted = {
        tuple((s.start, s.stop, len(s.devices)) for s in stages) for stages in all_stages(7, 3, 4)
    }
    assert {key(cut) for cut in found} == wanted
    assert len(found) == len(wanted)
    assert all(a.bound_us <= b.bound_us for a, b in pairwise(found))
    assert expected_least_us(variants(seed, 7, 4), 3) <= found[0].bound_us


def test_cuts_at_or_above_the_limit_are_left_out() -> None:
    every = list(cuts_by_bound(variants(0, 7, 4), 3))
    limit = every[len(every) // 2].bound_us
    below = list(cuts_by_bound(variants(0, 7, 4), 3, limit_us=lambda: limit))
    assert [key(c) for c in below] == [key(c) for c in every if c.bound_us < limit]


@pytest.mark.parametrize("max_nodes", [1, 3, 8])
def test_beyond_the_budget_good_cuts_come_with_a_bound_on_all_others(max_nodes: int) -> None:
    every = {key(cut): cut.bound_us for cut in cuts_by_bound(variants(1, 9, 4), 3)}
    *found, last = cuts_by_bound(variants(1, 9, 4), 3, max_nodes=max_nodes)
    assert last.parts == ()
    came = {key(cut) for cut in found}
    assert last.bound_us <= min(bound for cut, bound in every.items() if cut not in came)
    assert min(every[key(cut)] for cut in found) <= 1.1 * min(every.values())

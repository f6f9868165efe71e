"""Bounds of pipelines in two directions, against the simulation of every one of them."""

import random
from dataclasses import replace
from itertools import product

import pytest
from pair_brute import all_positions, pair_plan, random_pair

from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.planning.directions import Directions, costs_of
from lightning_dpipe.planning.pair_bounds import PairBounds
from lightning_dpipe.planning.pair_cuts import PairVariant, least_pair_us, pair_cuts_by_bound
from lightning_dpipe.planning.stage_costs import Cutting
from lightning_dpipe.planning.variants import expected_us, variants_of


def variants(directions: Directions, cutting: Cutting, probability: float) -> list[PairVariant]:
    return [
        (
            share,
            PairBounds(
                directions,
                replace(cutting, self_conditioned=conditioned),
                max_positions=3,
                frozen_us=0,
                hidden=False,
            ),
        )
        for conditioned, share in variants_of(directions.profile.graph, probability)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_and_every_cut_comes_once(seed: int) -> None:
    rng = random.Random(seed)
    for num_devices, num_positions in product(range(1, 5), range(1, 4)):
        num_down, num_up = rng.randint(1, 5), rng.randint(1, 4)
        if num_positions > min(num_devices, num_down, num_up):
            continue
        profile = random_pair(rng, num_down, num_up, feedback=rng.random() < 0.5)
        directions = costs_of(profile)
        assert isinstance(directions, Directions)
        batch_size, num_microbatches = rng.choice([4, 5, 8]), rng.randint(1, 4)
        schedule = rng.choice(["1f1b", "gpipe"])
        cutting = Cutting(
            sizes=split_sizes(batch_size * num_devices, num_microbatches),
            num_devices=num_devices,
            num_groups=2,
            schedule=schedule,
        )
        found = variants(directions, cutting, 0.5)
        cuts = list(pair_cuts_by_bound(found, num_positions))
        wanted = set(all_positions(num_down, num_up, num_positions, num_devices))
        assert {cut.positions for cut in cuts} == wanted
        assert len(cuts) == len(wanted)
        least_us = least_pair_us(found, num_positions)
        for cut in cuts:
            plan = pair_plan(
                profile,
                directions,
                cut.positions,
                num_groups=2,
                batch_size=batch_size,
                num_microbatches=num_microbatches,
                schedule=schedule,
            )
            end_us = expected_us(plan, profile, 0.5)
            assert least_us - 1e-6 <= cut.bound_us <= end_us + 1e-6

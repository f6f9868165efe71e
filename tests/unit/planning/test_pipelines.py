"""DiffusionPipe's objective as an option of plans and searches."""

import random
from dataclasses import replace

import pytest
from brute import random_profile
from pair_brute import random_pair

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.auto import Space, search
from lightning_dpipe.planning.directions import Directions, costs_of
from lightning_dpipe.planning.dp import paper_partition
from lightning_dpipe.planning.pair_cuts import pair_stages
from lightning_dpipe.planning.pair_dp import paper_pair_partition
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import expected_us


def cutting(num_devices: int, num_microbatches: int, batch: int, num_groups: int) -> Cutting:
    return Cutting(
        sizes=split_sizes(batch, num_microbatches),
        num_devices=num_devices,
        num_groups=num_groups,
        schedule="1f1b",
    )


def ranges(plan: Plan) -> list[tuple[int, int, int]]:
    return [(s.start, s.stop, len(s.devices)) for s in plan.stages]


@pytest.mark.parametrize("seed", range(3))
def test_a_given_number_of_stages_is_cut_by_t_max(seed: int) -> None:
    profile = random_profile(random.Random(seed), 7, frozen=True, feedback=False)
    plan = make_plan(profile, world_size=6, batch_size=8, num_stages=3, objective="paper")
    cut = paper_partition(
        BackboneCosts(profile, "net"), cutting(3, 12, 24, 2), num_stages=3, uniform=True
    )
    assert plan.num_microbatches == 12
    assert ranges(plan) == [(p.start, p.stop, p.replicas) for p in cut.parts]


@pytest.mark.parametrize("seed", range(3))
def test_several_backbones_are_cut_by_t_max_together(seed: int) -> None:
    profile = random_pair(random.Random(seed), 6, 5, frozen=True)
    plan = make_plan(profile, world_size=4, batch_size=8, num_stages=2, objective="paper")
    directions = costs_of(profile)
    assert isinstance(directions, Directions)
    cut = paper_pair_partition(directions, cutting(2, 8, 16, 2), num_positions=2, uniform=True)
    assert plan.stages == pair_stages(profile, directions, cut.positions)
    assert plan.fills


def backbones(seed: int) -> list[Profile]:
    rng = random.Random(seed)
    return [
        random_profile(rng, 6, frozen=True, feedback=False),
        random_pair(rng, 5, 4, frozen=True),
    ]


@pytest.mark.parametrize("seed", range(2))
def test_a_search_by_t_max_is_no_better_than_one_by_the_simulation_and_its_bound_holds(
    seed: int,
) -> None:
    for profile in backbones(seed):
        options = {"world_size": 2, "batch_size": 4}
        every = Space(max_plans=10**9, max_idle=None, max_nodes=None, close=0.0)
        exact = search(profile, space=every, **options)  # type: ignore[arg-type]
        paper = search(profile, space=Space(objective="paper"), **options)  # type: ignore[arg-type]
        assert paper.bound_us <= exact.expected_us <= paper.expected_us
        assert paper.expected_us == expected_us(paper.plan, profile)
        plan = make_plan(profile, num_stages="auto", objective="paper", **options)  # type: ignore[arg-type]
        assert replace(plan, origin=None) == paper.plan


def test_an_unknown_objective_and_cuts_with_one_are_refused() -> None:
    profile = random_profile(random.Random(0), 4, frozen=False, feedback=False)
    with pytest.raises(PlanError, match="unknown objective 'best'; choose one of simulated, paper"):
        make_plan(profile, world_size=2, batch_size=4, objective="best")
    with pytest.raises(PlanError, match="fix the stages"):
        make_plan(profile, world_size=2, batch_size=4, cuts=(2,), objective="paper")

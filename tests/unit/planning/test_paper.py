"""DiffusionPipe's planner against its outer search done in full."""

import random

import pytest
from brute import random_profile

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.planning.auto import MICROBATCHES, search
from lightning_dpipe.planning.dp import paper_partition
from lightning_dpipe.planning.paper import paper_plan
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import expected_us


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_the_best_of_every_stage_and_microbatch_count(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, 5, frozen=True, feedback=seed == 3)
    world_size, batch_size = 4, rng.choice([3, 8])
    ends = []
    for stages in (1, 2, 4):
        for microbatches in (m for m in MICROBATCHES if m <= batch_size * stages):
            cutting = Cutting(
                sizes=split_sizes(batch_size * stages, microbatches),
                num_devices=stages,
                num_groups=world_size // stages,
                schedule="1f1b",
            )
            cut = paper_partition(
                BackboneCosts(profile, "net"),
                cutting,
                num_stages=stages,
                probability=0.5 if seed == 3 else 0.0,
                uniform=True,
            )
            plan = make_plan(
                profile,
                world_size=world_size,
                batch_size=batch_size,
                num_microbatches=microbatches,
                num_stages=stages,
                cuts=[part.start for part in cut.parts[1:]],
                fill="paper",
            )
            ends.append(expected_us(plan, profile))
    found = paper_plan(profile, world_size=world_size, batch_size=batch_size, least_stages=1)
    assert found.expected_us == min(ends)
    assert found.num_plans <= len(ends)
    ours = search(profile, world_size=world_size, batch_size=batch_size)
    assert ours.expected_us <= found.expected_us
    assert ours.bound_us <= found.expected_us


def test_fixed_numbers_are_taken_and_impossible_ones_refused() -> None:
    profile = random_profile(random.Random(0), 5, frozen=True, feedback=False)
    fixed = {"world_size": 8, "batch_size": 4, "num_stages": 2, "num_microbatches": 4}
    found = paper_plan(profile, **fixed, fill=False)
    assert (len(found.plan.stages), found.plan.num_microbatches) == (2, 4)
    assert len(found.plan.groups) == 4
    assert found.plan.fills == ()
    assert paper_plan(profile, **fixed).expected_us <= found.expected_us
    with pytest.raises(PlanError, match="no plan for 3 ranks"):
        paper_plan(profile, world_size=3, batch_size=4, num_stages=2)

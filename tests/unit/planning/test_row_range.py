"""What has to be measured: the rows of every plan that a search looks at lie inside."""

import itertools

import pytest

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.planning.auto import MICROBATCHES, Space
from lightning_dpipe.planning.rows import row_range


def brute(world_size: int, batch_size: int, stages: int | None, m: int | None) -> tuple[int, int]:
    rows = set()
    for devices in (d for d in range(1, min(world_size, 16) + 1) if world_size % d == 0):
        total = batch_size * devices
        for microbatches in (x for x in ((m,) if m else MICROBATCHES) if x <= total):
            for size in split_sizes(total, microbatches):
                for replicas in range(1, devices + 2 - (stages or 1)):
                    rows |= {x for x in split_sizes(size, replicas) if x}
    return min(rows), max(rows)


@pytest.mark.parametrize(
    ("world_size", "batch_size", "stages", "m"),
    [
        case
        for case in itertools.product((1, 2, 6, 8), (1, 3, 8), (None, 2), (None, 2))
        if case[0] >= (case[2] or 1) and case[0] * case[1] >= (case[3] or 1)  # else refused
    ],
)
def test_the_range_holds_the_rows_of_every_candidate(
    world_size: int, batch_size: int, stages: int | None, m: int | None
) -> None:
    space = Space(num_stages=stages, num_microbatches=m)
    low, high = row_range(space, world_size=world_size, batch_size=batch_size)
    least, most = brute(world_size, batch_size, stages, m)
    assert 1 <= low <= least
    assert high == most


def test_a_stage_count_without_a_group_is_refused() -> None:
    with pytest.raises(PlanError, match="num_stages=2"):
        row_range(Space(num_stages=2), world_size=1, batch_size=3)


def test_more_microbatches_than_any_batch_are_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"2 ranks with 3 samples each .*num_microbatches=7"):
        row_range(Space(num_microbatches=7), world_size=2, batch_size=3)

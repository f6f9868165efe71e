from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.patches import PatchPlan, cut_rows


@given(num_rows=st.integers(1, 300), data=st.data())
def test_any_count_of_patches_up_to_the_rows_covers_each_row_once(
    num_rows: int, data: st.DataObject
) -> None:
    patches = data.draw(st.integers(1, num_rows))
    plan = cut_rows(num_rows, patches)
    rows = [row for m in range(len(plan)) for row in range(*plan.rows(m))]
    assert rows == list(range(num_rows))
    sizes = [b - a for a, b in pairwise(plan.cuts)]
    assert len(sizes) == patches
    assert max(sizes) - min(sizes) <= 1
    assert plan.rows(None) == (0, num_rows)


@pytest.mark.parametrize("patches", [0, -1, 9])
def test_an_illegal_count_raises_and_lists_the_legal_ones(patches: int) -> None:
    with pytest.raises(PlanError, match="legal are 1 to 8"):
        cut_rows(8, patches)


@pytest.mark.parametrize("cuts", [(), (0,), (1, 8), (0, 4, 4, 8), (0, 5, 3, 8)])
def test_cuts_must_rise_from_zero(cuts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="rising cuts"):
        PatchPlan(cuts)


def test_cuts_may_be_uneven_but_must_end_with_the_image() -> None:
    assert cut_rows(8, (0, 1, 6, 8)).rows(1) == (1, 6)
    with pytest.raises(PlanError, match=r"\[0, 1, 6\].*has 8 token rows"):
        cut_rows(8, (0, 1, 6))

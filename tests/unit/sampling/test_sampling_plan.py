import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.plan import Mode, SamplingPlan, even_stages


def test_a_plan_is_refused_with_what_is_wrong_in_it() -> None:
    stages = ((0, 3), (3, 6))
    with pytest.raises(PlanError, match="modes are exact, pipefusion"):
        SamplingPlan(stages=stages, mode="fast")
    with pytest.raises(PlanError, match="mode exact with 4 patches"):
        SamplingPlan(stages=stages, patches=4)
    with pytest.raises(PlanError, match="warmup=0; expected at least 1, keys and values"):
        SamplingPlan(stages=stages, mode=Mode.PIPEFUSION, warmup=0)
    with pytest.raises(PlanError, match="groups=0"):
        SamplingPlan(stages=stages, groups=0)
    with pytest.raises(PlanError, match="3 ranks for 2 stages"):
        SamplingPlan(stages=stages, ranks=(0, 1, 2))


@pytest.mark.parametrize(
    "stages", [(), ((0, 3),), ((0, 3), (2, 6)), ((0, 3), (4, 6)), ((0, 0), (0, 6)), ((1, 6),)]
)
def test_stages_must_hold_every_layer_once(stages: tuple[tuple[int, int], ...]) -> None:
    SamplingPlan(stages=((0, 3), (3, 6))).check(6)
    with pytest.raises(PlanError, match="each of 6 layers once"):
        SamplingPlan(stages=stages).check(6)


def test_no_default_reads_the_number_of_stages() -> None:
    plans = [SamplingPlan(stages=tuple((i, i + 1) for i in range(n))) for n in (1, 2, 8)]
    assert {(p.mode, p.patches, p.warmup, p.groups) for p in plans} == {(Mode.EXACT, 1, 1, 1)}


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=9), data=st.data())
def test_even_stages_have_the_least_largest_weight(weights: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(weights)))
    stages = even_stages(weights, count)
    SamplingPlan(stages=stages).check(len(weights))
    assert len(stages) == count

    def best(first: int, left: int) -> int:
        if left == 1:
            return sum(weights[first:])
        return min(
            max(sum(weights[first:cut]), best(cut, left - 1))
            for cut in range(first + 1, len(weights) - left + 2)
        )

    assert max(sum(weights[a:b]) for a, b in stages) == best(0, count)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="5 stages of 2 layers; legal are 1 to 2"):
        even_stages((1, 1), 5)

import pytest

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.planning.schedules import SCHEDULES, build_schedule
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.check import check_schedule
from synthetic import model_profile


@pytest.mark.parametrize("self_conditioned", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_legal_on_a_model_with_skips_and_feedback(
    name: str, num_stages: int, num_microbatches: int, self_conditioned: bool
) -> None:
    profile = model_profile([1] * 6, skips=((0, 5), (1, 4)), feedback=True)
    plan = make_plan(
        profile,
        world_size=num_stages,
        batch_size=8,
        num_microbatches=num_microbatches,
        schedule=name,
    )
    schedule = schedule_of(plan, self_conditioned=self_conditioned)
    check_schedule(schedule, plan, profile.graph, self_conditioned=self_conditioned)


def test_unknown_schedule_is_refused_with_the_known_names() -> None:
    with pytest.raises(ScheduleError, match=r"'2f2b'; choose one of: gpipe, 1f1b"):
        build_schedule("2f2b", num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(("stages", "parts"), [(0, 2), (2, 0), (-1, 1)])
def test_counts_below_one_are_refused_with_both_numbers(stages: int, parts: int) -> None:
    with pytest.raises(ScheduleError, match=f"num_stages={stages}, num_microbatches={parts}"):
        build_schedule("1f1b", num_stages=stages, num_microbatches=parts)

"""Schedules: one file each, a pure function of integers; the engine knows none of them.

A new schedule is a new file here and one line in `SCHEDULES`.
"""

from collections.abc import Callable, Mapping

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules.gpipe import gpipe
from lightning_dpipe.planning.schedules.one_f_one_b import one_f_one_b

__all__ = ["SCHEDULES", "build_schedule"]

SCHEDULES: Mapping[str, Callable[[int, int, bool], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}
"""Name -> function of (num_stages, num_microbatches, self_conditioned)."""


def build_schedule(
    name: str, *, num_stages: int, num_microbatches: int, self_conditioned: bool = False
) -> Schedule:
    """Order of ops per device.

    Args:
        name: A key of `SCHEDULES`.
        num_stages: Stages of the pipeline.
        num_microbatches: Parts of the group's batch.
        self_conditioned: Whether each micro-batch first runs a forward without gradient (S ops).

    Raises:
        ScheduleError: The name is unknown, or a count is below 1.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of: {', '.join(SCHEDULES)}")
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"num_stages={num_stages}, num_microbatches={num_microbatches}; both must be at least 1"
        )
    return SCHEDULES[name](num_stages, num_microbatches, self_conditioned)

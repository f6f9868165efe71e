"""The schedule that a plan names, on the plan's own devices."""

from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules import build_schedule


def schedule_of(plan: Plan, *, self_conditioned: bool = False) -> Schedule:
    """The order of ops that a plan names; each replica of a stage runs all of its ops.

    Raises:
        ScheduleError: The schedule is unknown.
    """
    by_stage = build_schedule(
        plan.schedule,
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches,
        self_conditioned=self_conditioned,
    )
    if all(len(stage.devices) == 1 for stage in plan.stages):
        return by_stage
    orders: list[tuple[Op, ...]] = [()] * plan.num_devices
    for stage, order in zip(plan.stages, by_stage.orders, strict=True):
        for device in stage.devices:
            orders[device] = order
    return Schedule(tuple(orders))

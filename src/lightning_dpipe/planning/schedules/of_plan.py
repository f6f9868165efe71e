"""The schedule that a plan names, on the plan's own devices."""

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules import build_schedule


def schedule_of(plan: Plan, *, self_conditioned: bool = False) -> Schedule:
    """The order of ops that a plan names; each replica of a stage runs all of its ops.

    Several stages on one and only device are data parallelism whose reductions start early: there
    the plan's schedule does not matter, see `one_device`.

    Raises:
        ScheduleError: The schedule is unknown.
    """
    by_stage = build_schedule(
        plan.schedule,
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches,
        self_conditioned=self_conditioned,
    )
    if plan.num_devices == 1 and len(plan.stages) > 1:
        return one_device(len(plan.stages), plan.num_microbatches, self_conditioned)
    if all(stage.devices == (i,) for i, stage in enumerate(plan.stages)):
        return by_stage
    orders: list[tuple[Op, ...]] = [()] * plan.num_devices
    for stage, order in zip(plan.stages, by_stage.orders, strict=True):
        for device in stage.devices:
            orders[device] = order
    return Schedule(tuple(orders))


def one_device(num_stages: int, num_microbatches: int, self_conditioned: bool = False) -> Schedule:
    """All stages on device 0: each micro-batch forward and back before the next one.

    A stage's gradients are complete, and their reduction starts, before the stages in front of it
    have run their last backward: the buckets of DDP, with the stages as buckets.
    """
    stages = range(num_stages)
    sweep = range(num_microbatches if self_conditioned else 0)
    order = [Op(stage, OpKind.S, m) for m in sweep for stage in stages]
    for m in range(num_microbatches):
        order += [Op(stage, OpKind.F, m) for stage in stages]
        order += [Op(stage, OpKind.B, m) for stage in reversed(stages)]
    return Schedule((tuple(order),))

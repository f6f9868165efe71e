"""The schedule that a plan names, on the plan's own devices."""

from collections.abc import Sequence

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules import build_schedule
from lightning_dpipe.planning.schedules.bidirectional import Chain, bidirectional


def schedule_of(plan: Plan, *, self_conditioned: bool = False) -> Schedule:
    """The order of ops that a plan names; each replica of a stage runs all of its ops.

    Several backbones share the devices, see `bidirectional`. All stages on one and only device are
    data parallelism whose reductions start early: there the plan's schedule does not matter, see
    `one_device`.

    Raises:
        ScheduleError: The schedule is unknown, or the plan does not say which of several backbones
            is self-conditioned.
    """
    by_stage = build_schedule(
        plan.schedule,
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches,
        self_conditioned=self_conditioned,
    )
    chains = plan.chains
    if len(chains) > 1:
        return _of_chains(plan, _conditioned(plan) if self_conditioned else None)
    if plan.num_devices == 1 and len(plan.stages) > 1:
        return one_device(chains, plan.num_microbatches, chains[0] if self_conditioned else ())
    if all(stage.devices == (i,) for i, stage in enumerate(plan.stages)):
        return by_stage
    orders: list[tuple[Op, ...]] = [()] * plan.num_devices
    for stage, order in zip(plan.stages, by_stage.orders, strict=True):
        for device in stage.devices:
            orders[device] = order
    return Schedule(tuple(orders))


def one_device(
    chains: Sequence[Sequence[int]], num_microbatches: int, swept: Sequence[int] = ()
) -> Schedule:
    """All stages on device 0: each micro-batch forward and back before the next one.

    A stage's gradients are complete, and their reduction starts, before the stages in front of it
    have run their last backward: the buckets of DDP, with the stages as buckets. `swept` are the
    stages that first run a forward without gradient (S ops).
    """
    order = [Op(stage, OpKind.S, m) for m in range(num_microbatches) for stage in swept]
    for m in range(num_microbatches):
        for stages in chains:
            order += [Op(stage, OpKind.F, m) for stage in stages]
            order += [Op(stage, OpKind.B, m) for stage in reversed(stages)]
    return Schedule((tuple(order),))


def _of_chains(plan: Plan, conditioned: str | None) -> Schedule:
    """Several backbones on the plan's devices; None: no step of any is self-conditioned."""
    if plan.num_devices == 1:
        swept = next((c for c in plan.chains if plan.stages[c[0]].backbone == conditioned), ())
        return one_device(plan.chains, plan.num_microbatches, swept)
    chains = [
        Chain(
            stages=chain,
            devices=tuple(plan.stages[i].devices for i in chain),
            lengths=tuple(plan.lengths[i] for i in chain) if plan.lengths else (),
            self_conditioned=plan.stages[chain[0]].backbone == conditioned,
        )
        for chain in plan.chains
    ]
    return bidirectional(
        plan.schedule,
        chains,
        num_devices=plan.num_devices,
        num_microbatches=plan.num_microbatches,
    )


def _conditioned(plan: Plan) -> str:
    """The backbone that self-conditioned steps run twice."""
    names = [plan.stages[chain[0]].backbone for chain in plan.chains]
    if plan.conditioned not in names:
        raise ScheduleError(
            f"the plan says that {plan.conditioned!r} is self-conditioned, its backbones are "
            f"{', '.join(names)}; set Plan.conditioned, or plan again"
        )
    return plan.conditioned

"""Lower a Plan and a Schedule to one straight-line Program per device of a group.

Three passes, each alone in a file: `emit` walks each device's ops and writes waits, work and sends;
`receive` posts every receive a few ops ahead, in the order its sender sends; `lifetimes` frees each
slot after its last use and gives receives and gathers numbered buffers.
"""

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.program import Program, StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.lowering.context import Lowering
from lightning_dpipe.lowering.emit import DeviceEmitter
from lightning_dpipe.lowering.lifetimes import free_and_number
from lightning_dpipe.lowering.receive import post_receives
from lightning_dpipe.lowering.rows import layout


def lower(
    plan: Plan,
    schedule: Schedule,
    graph: ModelGraph,
    shape: StepShape,
    *,
    group: int = 0,
    next_graph: ModelGraph | None = None,
) -> tuple[Program, ...]:
    """Make the programs of one pipeline group for one shape class.

    Args:
        plan: The decisions.
        schedule: Order of ops per device, for ``plan.num_microbatches``.
        graph: The model's values and layers.
        shape: Batch sizes and variant, see `StepShape`.
        group: Which of the plan's groups.
        next_graph: That of the next batch, if its values have other shapes.

    Returns:
        One program per device, in device order.

    Raises:
        PlanError: The shape does not fit the plan.
        UnsupportedError: A device holds a replicated stage and another one.
    """
    ranks = plan.groups[group]
    for name, sizes in (("sizes", shape.sizes), ("next_sizes", shape.next_sizes)):
        if sizes is not None and len(sizes) != len(ranks):
            raise PlanError(f"{name} has {len(sizes)} entries for a group of {len(ranks)} devices")
    _check_replicas(plan, shape)
    lowering = Lowering(
        plan=plan,
        schedule=schedule,
        graph=graph,
        shape=shape,
        ranks=ranks,
        layout=layout(shape.sizes, ranks, plan.num_microbatches),
        next_graph=next_graph,
    )
    emitted = [DeviceEmitter(lowering, device).emit() for device in range(len(ranks))]
    programs = []
    for device, steps in enumerate(post_receives(emitted)):
        instructions, num_slots, buffers = free_and_number(steps)
        programs.append(
            Program(
                rank=ranks[device],
                device=device,
                shape=shape,
                num_slots=num_slots,
                buffers=buffers,
                instructions=instructions,
            )
        )
    return tuple(programs)


def _check_replicas(plan: Plan, shape: StepShape) -> None:
    """A replica works on its rows of each micro-batch: those of its device, whatever the stage."""
    rows = sum(shape.sizes) // plan.num_microbatches
    for index, stage in enumerate(plan.stages):
        if len(stage.devices) == 1:
            continue
        if rows < len(stage.devices):
            raise PlanError(
                f"stage {index} has {len(stage.devices)} replicas, but {plan.num_microbatches} "
                f"micro-batches of {sum(shape.sizes)} samples have only {rows} rows; use fewer "
                "micro-batches or replicas"
            )
        for device in stage.devices:
            for other in plan.stages_on(device):
                if plan.stages[other].devices != stage.devices:
                    raise UnsupportedError(
                        f"device {device} holds a replica of stage {index}, which is on devices "
                        f"{stage.devices}, and stage {other}, which is on devices "
                        f"{plan.stages[other].devices}; stages that share a device and have "
                        "replicas must be on the same devices"
                    )

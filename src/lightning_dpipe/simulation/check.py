"""Legality and deadlock, proved before anything runs.

In:     a Schedule with its Plan and ModelGraph, or the Programs of one pipeline group.
Out:    nothing; a ScheduleError that names device and op, or rank and instruction.

A schedule is legal when every op is there once, on a device that holds its stage, each stage runs
its backwards in ascending micro-batch order (the order in which one process sums gradients), and
walking all devices side by side reaches the end. Programs are checked on what they really do:
messages, slots and buffers (see `manifest`, `slots`, `rendezvous`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_dpipe.core.crossings import crossings, loss_stage, stage_reads
from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.program import Program
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.simulation.manifest import check_manifest, manifest_digest
from lightning_dpipe.simulation.rendezvous import check_progress
from lightning_dpipe.simulation.slots import check_slots

__all__ = ["check_programs", "check_schedule", "manifest_digest"]

_NEEDS = {OpKind.B: OpKind.F, OpKind.I: OpKind.F, OpKind.W: OpKind.I}
_ASCENDING = ((OpKind.B, OpKind.I), (OpKind.B, OpKind.W))


def check_schedule(
    schedule: Schedule, plan: Plan, graph: ModelGraph, *, self_conditioned: bool = False
) -> None:
    """Check that a schedule computes one step of the plan, and ends.

    Args:
        schedule: The order of ops on each device of one pipeline group.
        plan: Its stages, devices and number of micro-batches.
        graph: The model, for what crosses stage borders.
        self_conditioned: Whether this is a step whose forwards read a first estimate (S ops).

    Raises:
        ScheduleError: An op is missing, doubled, foreign, on the wrong device or out of order, or
            the devices wait for each other in a circle.
    """
    placed = _place(schedule, plan)
    _check_complete(placed, plan, graph, self_conditioned)
    for device, order in enumerate(schedule.orders):
        _check_order(device, order)
    _walk(schedule, _dependencies(placed, plan, graph, self_conditioned))


def check_programs(programs: Sequence[Program]) -> None:
    """Check the programs of one pipeline group (one per device) against each other.

    Proves that what is sent on each channel is what is posted there, that every slot and buffer is
    used in a legal order, and that the step ends even if no transfer can complete before both
    sides have reached it (rendezvous sends).

    Raises:
        ScheduleError: One of these does not hold; rank, instruction and message are named.
    """
    check_manifest(programs)
    for program in programs:
        check_slots(program)
    check_progress(programs)


def _place(schedule: Schedule, plan: Plan) -> dict[Op, list[int]]:
    """Devices of each op, after checking that the op may be there.

    A replica works on its rows of every micro-batch, so each op of a stage is on all its devices.
    """
    if len(schedule.orders) != plan.num_devices:
        raise ScheduleError(
            f"the schedule has {len(schedule.orders)} devices, the plan has {plan.num_devices}; "
            "build the schedule from this plan"
        )
    placed: dict[Op, list[int]] = {}
    for device, order in enumerate(schedule.orders):
        for op in order:
            _check_op(op, device, plan)
            homes = placed.setdefault(op, [])
            if device in homes:
                raise ScheduleError(
                    f"device {device}: op {op} is on device {device} already; run each op once"
                )
            homes.append(device)
    for op, homes in sorted(placed.items()):
        for device in plan.stages[op.stage].devices:
            if device not in homes:
                raise ScheduleError(
                    f"device {device}: op {op} is missing, device {homes[0]} has it; every replica "
                    "of a stage runs all of its ops, on its own rows"
                )
    return placed


def _check_op(op: Op, device: int, plan: Plan) -> None:
    if op.kind is OpKind.N:
        raise ScheduleError(
            f"device {device}: op {op} is frozen work; the plan's fills place it, not the schedule"
        )
    if op.stage >= len(plan.stages) or op.microbatch >= plan.num_microbatches:
        raise ScheduleError(
            f"device {device}: op {op} is not in the plan, which has {len(plan.stages)} stages "
            f"and {plan.num_microbatches} micro-batches; build the schedule from this plan"
        )
    if device not in plan.stages[op.stage].devices:
        raise ScheduleError(
            f"device {device}: op {op} runs where stage {op.stage} is not; "
            f"it is on device {', '.join(map(str, plan.stages[op.stage].devices))}"
        )


def _check_complete(
    placed: Mapping[Op, Sequence[int]], plan: Plan, graph: ModelGraph, self_conditioned: bool
) -> None:
    if self_conditioned and graph.feedback is None:
        raise ScheduleError(
            "a self-conditioned schedule for a model without self-conditioning; "
            "set PipelineSpec.self_conditioning or build the plain schedule"
        )
    for index, stage in enumerate(plan.stages):
        layers = graph.component(stage.backbone).layers[stage.start : stage.stop]
        trained = any(layer.trained for layer in layers)
        forwards = {OpKind.F}
        if self_conditioned and graph.feedback and graph.feedback.backbone == stage.backbone:
            forwards.add(OpKind.S)
        for microbatch in range(plan.num_microbatches):
            found = {k for k in OpKind if Op(index, k, microbatch) in placed}
            split = {OpKind.I, OpKind.W} if trained or OpKind.W in found else {OpKind.I}
            wanted = forwards | ({OpKind.B} if found.isdisjoint(split) else split)
            for kinds, problem in ((wanted - found, "missing"), (found - wanted, "too many")):
                for op in sorted(Op(index, kind, microbatch) for kind in kinds):
                    where = placed.get(op, stage.devices)[0]
                    needs = " ".join(str(Op(index, k, microbatch)) for k in OpKind if k in wanted)
                    raise ScheduleError(
                        f"device {where}: op {op} is {problem}; stage {index} needs exactly {needs}"
                    )


def _check_order(device: int, order: Sequence[Op]) -> None:
    """Own forward first, and backwards in the order in which one process sums gradients."""
    seen: set[Op] = set()
    latest: dict[tuple[int, tuple[OpKind, OpKind]], Op] = {}
    for op in order:
        need = _NEEDS.get(op.kind)
        if need is not None and Op(op.stage, need, op.microbatch) not in seen:
            raise ScheduleError(
                f"device {device}: op {op} comes before {Op(op.stage, need, op.microbatch)}, "
                "which it needs; swap them"
            )
        for chain in _ASCENDING:
            if op.kind in chain:
                before = latest.setdefault((op.stage, chain), op)
                if before.microbatch > op.microbatch:
                    raise ScheduleError(
                        f"device {device}: op {op} comes after {before}; a stage's backwards run "
                        "in ascending micro-batch order, or gradients differ from one process's"
                    )
                latest[op.stage, chain] = op
        seen.add(op)


def _dependencies(
    placed: Mapping[Op, Sequence[int]], plan: Plan, graph: ModelGraph, self_conditioned: bool
) -> dict[Op, tuple[Op, ...]]:
    """What each op waits for: inputs of forwards, returning gradients of backwards."""
    inputs: dict[int, set[int]] = {}
    gradients: dict[int, set[int]] = {}
    for crossing in crossings(graph, plan.stages):
        for reader in crossing.readers:
            inputs.setdefault(reader, set()).add(crossing.writer)
        if graph.values[crossing.value].requires_grad:
            for source, target in crossing.gradient_hops:
                gradients.setdefault(target, set()).add(source)
    estimated_by, conditioned = _feedback_edges(plan, graph) if self_conditioned else (0, set())

    def placed_as(stage: int, kind: OpKind, instead: OpKind, microbatch: int) -> Op:
        wanted = Op(stage, kind, microbatch)
        return wanted if wanted in placed else Op(stage, instead, microbatch)

    def needs(op: Op) -> set[Op]:
        stage, m = op.stage, op.microbatch
        if op.kind in (OpKind.F, OpKind.S):
            # Only the self-conditioned backbone has S ops; another one's values come from its F.
            found = {placed_as(w, op.kind, OpKind.F, m) for w in inputs.get(stage, ())}
            if op.kind is OpKind.F and stage in conditioned:
                found.add(Op(estimated_by, OpKind.S, m))
            return found
        if op.kind is OpKind.W:
            return set()
        # The own forward comes first in the device's order, which `_check_order` has seen.
        return {placed_as(s, OpKind.B, OpKind.I, m) for s in gradients.get(stage, ())}

    return {op: tuple(sorted(needs(op))) for op in placed}


def _feedback_edges(plan: Plan, graph: ModelGraph) -> tuple[int, set[int]]:
    """The stage that makes the first estimate, and the stages whose forwards read it."""
    feedback = graph.feedback
    assert feedback is not None  # `_check_complete` refused this
    readers = {
        stage
        for stage in range(len(plan.stages))
        if feedback.writes in stage_reads(graph, plan.stages, stage)
    }
    return loss_stage(graph, plan.stages, feedback.backbone), readers


def _walk(schedule: Schedule, waits_for: Mapping[Op, tuple[Op, ...]]) -> None:
    """Let every device run as far as it can, until all are done or all are blocked."""
    done: set[Op] = set()
    left = Counter(op for order in schedule.orders for op in order)
    position = [0] * len(schedule.orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(schedule.orders):
            while position[device] < len(order):
                op = order[position[device]]
                if not done.issuperset(waits_for[op]):
                    break
                left[op] -= 1  # done once every replica has done its rows
                if not left[op]:
                    done.add(op)
                position[device] += 1
                moved = True
    stuck = [
        f"device {device} stops at {op}, which waits for "
        + " and ".join(str(need) for need in waits_for[op] if need not in done)
        for device, order in enumerate(schedule.orders)
        for op in order[position[device] : position[device] + 1]
    ]
    if stuck:
        raise ScheduleError(
            "the devices wait for each other in a circle: "
            + "; ".join(stuck)
            + ". Move one of these ops behind what it waits for"
        )

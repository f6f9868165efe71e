"""A schedule passes exactly when an independent topological sort can order it."""

import graphlib
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.simulation.check import check_schedule
from synthetic import model_graph

ONE_F_ONE_B = """
device 0: 0F0 0F1 0B0 0F2 0B1 0B2
device 1: 1F0 1B0 1F1 1B1 1F2 1B2
"""


def plan_of(
    num_stages: int,
    num_microbatches: int,
    *,
    devices: tuple[tuple[int, ...], ...] | None = None,
    num_devices: int | None = None,
) -> Plan:
    """One layer a stage, one stage a device unless `devices` says otherwise."""
    at = devices or tuple((s,) for s in range(num_stages))
    return Plan(
        graph_digest="",
        profile_digest="",
        groups=(tuple(range(num_devices or num_stages)),),
        stages=tuple(
            Stage(backbone="net", start=s, stop=s + 1, devices=at[s]) for s in range(num_stages)
        ),
        num_microbatches=num_microbatches,
        batch_size=8,
        schedule="test",
    )


def check(text: str, plan: Plan, graph: ModelGraph | None = None, **options: bool) -> None:
    check_schedule(Schedule.parse(text), plan, graph or model_graph(len(plan.stages)), **options)


def test_1f1b_is_legal() -> None:
    check(ONE_F_ONE_B, plan_of(2, 3))


def test_split_backward_is_legal_and_feeds_the_stage_before() -> None:
    check("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1F1 1I1 1W0 1W1", plan_of(2, 2))


def test_two_chunks_on_a_device_are_legal() -> None:
    plan = plan_of(4, 1, devices=((0,), (1,), (1,), (0,)), num_devices=2)
    check("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", plan)


def test_every_replica_of_a_stage_runs_all_its_microbatches() -> None:
    plan = plan_of(2, 2, devices=((0,), (1, 2)), num_devices=3)
    both = "1F0 1B0 1F1 1B1"
    check(f"0F0 0F1 0B0 0B1\n{both}\n{both}", plan)
    with pytest.raises(ScheduleError, match=r"device 2: op 1B1 is missing, device 1 has it"):
        check(f"0F0 0F1 0B0 0B1\n{both}\n1F0 1B0", plan)


def test_self_conditioned_forwards_wait_for_the_last_stages_estimate() -> None:
    plan, graph = plan_of(2, 1), model_graph(2, feedback=True)
    check("0S0 0F0 0B0\n1S0 1F0 1B0", plan, graph, self_conditioned=True)
    with pytest.raises(
        ScheduleError, match=r"device 0 stops at 0F0, which waits for 1S0; device 1 stops at 1S0"
    ):
        check("0F0 0S0 0B0\n1S0 1F0 1B0", plan, graph, self_conditioned=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0", "has 1 devices, the plan has 2"),
        ("0F0 0B0 0B1\n1F0 1B0 1F1 1B1", "device 0: op 0F1 is missing; .* exactly 0F1 0B1"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "device 1: op 1B1 is missing"),
        ("0F0 0F1 0B0 0I0 0B1\n1F0 1B0 1F1 1B1", "device 0: op 0W0 is missing"),
        ("0F0 0F1 0B0 0I0 0W0 0B1\n1F0 1B0 1F1 1B1", "device 0: op 0B0 is too many"),
        ("0F0 0F1 0B0 0B1 0F0\n1F0 1B0 1F1 1B1", "device 0: op 0F0 is on device 0 already"),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1 0B1", "device 1: op 0B1 runs where stage 0 is not"),
        ("0F0 0F1 0B0 0B1 0F2\n1F0 1B0 1F1 1B1", "device 0: op 0F2 is not in the plan"),
        ("0F0 0F1 0B0 0B1 2F0\n1F0 1B0 1F1 1B1", "device 0: op 2F0 is not in the plan"),
        ("0F0 0F1 0B0 0B1 0N0\n1F0 1B0 1F1 1B1", "device 0: op 0N0 is frozen work"),
        ("0F0 0F1 0B0 0B1 0S0\n1F0 1B0 1F1 1B1", "device 0: op 0S0 is too many"),
        ("0F0 0B1 0F1 0B0\n1F0 1B0 1F1 1B1", "device 0: op 0B1 comes before 0F1"),
        ("0F0 0F1 0B0 0W1 0I1\n1F0 1B0 1F1 1B1", "device 0: op 0W1 comes before 0I1"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", "device 0: op 0B0 comes after 0B1"),
        ("0F0 0F1 0I0 0I1 0W1 0W0\n1F0 1F1 1B0 1B1", "device 0: op 0W0 comes after 0W1"),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
            "device 0 stops at 0B0, which waits for 1B0; device 1 stops at 1F1, .* for 0F1",
        ),
    ],
)
def test_illegal_schedules_are_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(text, plan_of(2, 2))


def test_missing_feedback_is_named() -> None:
    with pytest.raises(ScheduleError, match="without self-conditioning"):
        check(ONE_F_ONE_B, plan_of(2, 3), self_conditioned=True)


def test_a_stage_without_trained_layers_needs_no_weight_gradient() -> None:
    graph = model_graph(2)
    net = graph.component("net")
    locked = replace(net, layers=(replace(net.layers[0], trained=False), net.layers[1]))
    check("0F0 0I0\n1F0 1B0", plan_of(2, 1), replace(graph, components=(locked,)))
    with pytest.raises(ScheduleError, match="op 0W0 is missing"):
        check("0F0 0I0\n1F0 1B0", plan_of(2, 1), graph)


def test_gradient_of_a_skip_comes_back_through_the_reader_between() -> None:
    # Value h0 is read by stages 1 and 3; its gradient goes 3 -> 1 -> 0, not 3 -> 0.
    plan, graph = plan_of(4, 1), model_graph(4, skips=((0, 3),))
    order = "0F0 0B0\n1F0 1B0\n2F0 2B0\n3F0 3B0"
    check(order, plan, graph)
    values = tuple(replace(v, requires_grad=v.name != "h2") for v in graph.values)
    # With h2 cut off, 1B0 can only be waiting for 3B0 because of the skip's return path.
    detached = replace(graph, values=values)
    both = plan_of(4, 1, devices=((0,), (1,), (2,), (1,)), num_devices=3)
    with pytest.raises(ScheduleError, match=r"device 1 stops at 1B0, which waits for .*3B0"):
        check("0F0 0B0\n1F0 1B0 3F0 3B0\n2F0 2B0", both, detached)


def needs(op: Op, last: int) -> set[Op]:
    """The dependencies of a plain chain, written down by hand."""
    if op.kind is OpKind.F:
        return {Op(op.stage - 1, OpKind.F, op.microbatch)} if op.stage else set()
    found = {Op(op.stage, OpKind.F, op.microbatch)}
    return found | ({Op(op.stage + 1, OpKind.B, op.microbatch)} if op.stage < last else set())


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, int, Schedule]:
    """A legal schedule (a random run of all devices), then up to two swaps of neighbours."""
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    waiting = [
        Op(s, k, m)
        for s in range(num_stages)
        for k in (OpKind.F, OpKind.B)
        for m in range(num_microbatches)
    ]
    done: list[Op] = []
    while waiting:
        ready = [
            op
            for op in waiting
            if needs(op, num_stages - 1).issubset(done)
            and (op.kind is OpKind.F or Op(op.stage, op.kind, op.microbatch - 1) not in waiting)
        ]
        done.append(draw(st.sampled_from(ready)))
        waiting.remove(done[-1])
    lines = [[op for op in done if op.stage == stage] for stage in range(num_stages)]
    for _ in range(draw(st.integers(0, 2))):
        line = draw(st.sampled_from(lines))
        i = draw(st.integers(0, len(line) - 2))
        line[i], line[i + 1] = line[i + 1], line[i]
    return num_stages, num_microbatches, Schedule(tuple(map(tuple, lines)))


@settings(deadline=None, max_examples=150)
@given(orders())
def test_accepts_exactly_what_a_topological_sort_can_order(
    case: tuple[int, int, Schedule],
) -> None:
    num_stages, num_microbatches, schedule = case
    ascending = all(
        before.microbatch < after.microbatch
        for order in schedule.orders
        for before, after in combinations([op for op in order if op.kind is OpKind.B], 2)
    )
    graph = {op: needs(op, num_stages - 1) for order in schedule.orders for op in order}
    for order in schedule.orders:
        for before, after in pairwise(order):
            graph[after].add(before)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
        legal = ascending
    except graphlib.CycleError:
        legal = False
    try:
        check_schedule(schedule, plan_of(num_stages, num_microbatches), model_graph(num_stages))
        accepted = True
    except ScheduleError:
        accepted = False
    assert accepted == legal

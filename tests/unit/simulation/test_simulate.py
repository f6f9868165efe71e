import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError, ScheduleError
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Fill, Plan, Stage, split_sizes
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.core.timeline import Activity, Span, Timeline
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile

TEXT = FrozenChain(name="text", forward_us=(6, 4))


def plan_for(profile: Profile, stages: int, batch: int, parts: int, **options: object) -> Plan:
    return make_plan(
        profile,
        world_size=stages,
        batch_size=batch,
        num_microbatches=parts,
        fill=False,
        **options,  # type: ignore[arg-type]
    )


def run(plan: Plan, profile: Profile, *, self_conditioned: bool = False) -> Timeline:
    """The pipeline alone: this batch is encoded and delivered, and there is no next one."""
    shape = StepShape(
        sizes=(plan.batch_size,) * plan.num_devices,
        encoded=True,
        self_conditioned=self_conditioned,
    )
    schedule = schedule_of(plan, self_conditioned=self_conditioned)
    return simulate(plan, schedule, profile, shape=shape)


def spans(timeline: Timeline, device: int) -> list[tuple[str, int, int]]:
    return [(s.label, s.start_us, s.end_us) for s in timeline.spans if s.device == device]


def op_span(timeline: Timeline, text: str) -> Span:
    return next(s for s in timeline.spans if s.op == Op.parse(text))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_equal_stages_and_free_messages_take_m_plus_s_minus_1_slots(
    num_stages: int, num_microbatches: int, schedule: str
) -> None:
    profile = model_profile([10] * num_stages, [17] * num_stages, width=0)
    batch = num_microbatches  # per device; the group's micro-batch is num_stages samples
    plan = plan_for(profile, num_stages, batch, num_microbatches, schedule=schedule)
    end_us = simulate(plan, schedule_of(plan), profile).end_us
    assert end_us == (num_microbatches + num_stages - 1) * 27 * num_stages


@settings(deadline=None, max_examples=60)
@given(
    times=st.lists(st.integers(0, 50), min_size=4, max_size=8),
    num_stages=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    latency_us=st.integers(0, 60),
    skips=st.lists(st.sampled_from([(0, 3), (1, 3), (0, 2)]), unique=True),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    extra=st.integers(0, 5),
)
def test_every_op_ends_when_a_recursion_over_its_dependencies_says(
    times: list[int],
    num_stages: int,
    num_microbatches: int,
    latency_us: int,
    skips: list[tuple[int, int]],
    schedule: str,
    extra: int,
) -> None:
    link = Link(latency_us=latency_us, bytes_per_s=10**15)
    profile = model_profile(times, skips=skips, width=0, p2p=link)
    plan = plan_for(
        profile, num_stages, num_microbatches + extra, num_microbatches, schedule=schedule
    )
    orders = schedule_of(plan).orders
    rows = split_sizes(plan.batch_size * num_stages, num_microbatches)
    stage_of = [
        next(i for i, s in enumerate(plan.stages) if s.start <= x < s.stop)
        for x in range(len(times))
    ]
    reads = [(i, i + 1) for i in range(len(times) - 1)] + list(skips)
    readers = {
        a: sorted({stage_of[b] for x, b in reads if x == a} - {stage_of[a]})
        for a in range(len(times))
    }

    @functools.cache
    def end(op: Op) -> int:
        position = orders[op.stage].index(op)
        start = end(orders[op.stage][position - 1]) if position else 0
        stage, m = plan.stages[op.stage], op.microbatch
        length = rows[m] * sum(times[stage.start : stage.stop])
        for layer, at in readers.items():
            path = [stage_of[layer], *at]
            if op.kind is OpKind.F and op.stage in at:
                start = max(start, end(Op(path[0], OpKind.F, m)) + latency_us)
            if op.kind is OpKind.B and op.stage in path[:-1]:
                later = path[path.index(op.stage) + 1]
                start = max(start, end(Op(later, OpKind.B, m)) + latency_us)
        return start + length * (1 if op.kind is OpKind.F else 2)

    found = {s.op: s.end_us for s in run(plan, profile).spans if s.op}
    assert found == {op: end(op) for order in orders for op in order}


@settings(deadline=None, max_examples=40)
@given(
    num_stages=st.integers(1, 3),
    batch_size=st.integers(2, 7),
    encoded=st.booleans(),
    host_us=st.integers(0, 3),
    num_groups=st.integers(1, 2),
)
def test_spans_never_overlap_and_the_ledger_sums_to_the_iteration(
    num_stages: int, batch_size: int, encoded: bool, host_us: int, num_groups: int
) -> None:
    profile = model_profile(
        [3, 9, 4, 2],
        frozen=(TEXT, FrozenChain(name="noise", forward_us=(1,), after=("text",))),
        skips=((0, 3),),
        p2p=Link(latency_us=3, bytes_per_s=10**7, host_us=host_us),
        allreduce=Link(latency_us=5, bytes_per_s=10**9),
        optimizer_us=2,
        overhead_us=11,
    )
    plan = make_plan(
        profile, world_size=num_stages * num_groups, num_stages=num_stages, batch_size=batch_size
    )
    sizes = (batch_size,) * num_stages
    shape = StepShape(sizes=sizes, next_sizes=sizes, encoded=encoded)
    timeline = simulate(plan, schedule_of(plan), profile, shape=shape)
    for device in range(num_stages):
        mine = [s for s in timeline.spans if s.device == device]
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(mine))
        assert all(0 <= s.start_us <= s.end_us <= timeline.end_us for s in mine)
        assert mine[-1].end_us == timeline.end_us
    ledger = timeline.ledger()
    assert sum(ledger.values()) == num_stages * timeline.end_us
    assert ledger["bubble"] >= 0
    frozen_us = 11 * batch_size * num_stages
    assert ledger["frozen"] == frozen_us * (1 if encoded else 2)


def test_messages_of_one_edge_share_its_bandwidth_and_pipeline_its_latency() -> None:
    # Layer 0 writes 32 B a sample for layers 1 and 3; so does layer 1: two messages leave stage 0.
    link = Link(latency_us=100, bytes_per_s=2_000_000)  # 2 bytes a microsecond
    profile = model_profile([10, 10, 10, 10], skips=((0, 3),), p2p=link)
    plan = plan_for(profile, 2, 1, 2)
    timeline = run(plan, profile)
    # Both are handed over at 20; 16 us on the wire each; then 100 us of latency, once.
    assert op_span(timeline, "1F0").start_us == 20 + 2 * 16 + 100
    # The two of micro-batch 1 are handed over at 40 and queue behind 52.
    assert spans(timeline, 1)[:2] == [("wait 1F0", 20, 152), ("1F0", 152, 172)]


def test_what_a_message_costs_the_host_is_inside_the_op_that_sends_it() -> None:
    link = Link(latency_us=0, bytes_per_s=10**15, host_us=7)
    profile = model_profile([10, 10, 10, 10], skips=((0, 3),), width=0, p2p=link)
    plan = plan_for(profile, 2, 1, 2)
    timeline = run(plan, profile)
    assert op_span(timeline, "0F0").length_us == 20 + 2 * 7
    assert op_span(timeline, "1F0").length_us == 20
    assert op_span(timeline, "1F0").start_us == 34
    assert op_span(timeline, "1B0").length_us == 40 + 2 * 7


def test_a_gradient_returns_through_the_reader_between() -> None:
    # Layer 0 is read by stages 1 and 2: its gradient goes 2 -> 1 -> 0, after 1's own backward.
    link = Link(latency_us=5, bytes_per_s=10**15)
    profile = model_profile([10, 10, 10], skips=((0, 2),), width=0, p2p=link)
    timeline = simulate((plan := plan_for(profile, 3, 1, 3)), schedule_of(plan), profile)
    for m in range(3):
        ends = [op_span(timeline, f"{s}B{m}") for s in range(3)]
        assert ends[1].start_us >= ends[2].end_us + 5
        assert ends[0].start_us >= ends[1].end_us + 5


def test_self_conditioned_forwards_wait_for_the_last_stages_estimate() -> None:
    link = Link(latency_us=50, bytes_per_s=10**15)
    profile = model_profile([10, 10], feedback=True, width=0, p2p=link)
    plan = plan_for(profile, 2, 1, 2)
    timeline = run(plan, profile, self_conditioned=True)
    assert op_span(timeline, "0S0").start_us == 0
    assert op_span(timeline, "1S0").start_us == 60
    assert op_span(timeline, "1S0").activity is Activity.SELF_CONDITIONING
    for m in range(2):
        assert op_span(timeline, f"0F{m}").start_us >= op_span(timeline, f"1S{m}").end_us + 50
    assert op_span(timeline, "0F0").start_us == 120
    assert op_span(timeline, "0F0").length_us == op_span(timeline, "0S0").length_us


def test_an_unfilled_iteration_encodes_first_and_waits_for_the_others_rows() -> None:
    link = Link(latency_us=30, bytes_per_s=1_000_000)  # a byte a microsecond
    profile = model_profile([10, 10], frozen=(TEXT,), p2p=link)
    plan = plan_for(profile, 2, 3, 2)
    timeline = simulate(plan, schedule_of(plan), profile)
    encode = ("text[0:2] 0:3", 0, 30)
    # Both stages read a batch field, sent at once, and `text`: three rows of 32 bytes each come
    # from the other device, one after the other: 2 x 96 us on the wire, then 30 us of latency.
    assert spans(timeline, 0)[:3] == [encode, ("wait 0F0", 30, 222), ("0F0", 222, 252)]
    assert op_span(timeline, "1F0").start_us == 252 + 96 + 30
    assert timeline.fill_ratio == 0


def test_fills_run_after_their_op_and_cost_their_own_sample_count() -> None:
    profile = model_profile([10, 10], frozen=(TEXT,), width=0)
    plan = plan_for(profile, 2, 2, 2)

    def put(device: int, after: str | None, rows: tuple[int, int], layers: tuple[int, int]) -> Fill:
        return Fill(
            device=device,
            after=None if after is None else Op.parse(after),
            component="text",
            start=layers[0],
            stop=layers[1],
            first=rows[0],
            last=rows[1],
        )

    fills = (
        put(0, "0F1", (0, 2), (0, 2)),
        put(1, None, (0, 1), (0, 2)),
        put(1, "1B1", (1, 2), (0, 1)),
        put(1, "1B1", (1, 2), (1, 2)),
    )
    plan = replace(plan, fills=fills)
    timeline = simulate(plan, schedule_of(plan), profile)
    assert spans(timeline, 0)[:4] == [
        ("0F0", 0, 20),
        ("0F1", 20, 40),
        ("text[0:2] 0:2", 40, 60),
        ("0B0", 80, 120),
    ]
    assert spans(timeline, 1) == [
        ("text[0:2] 0:1", 0, 10),
        ("1F0", 20, 40),
        ("1B0", 40, 80),
        ("1F1", 80, 100),
        ("1B1", 100, 140),
        ("text[0:1] 1:2", 140, 146),
        ("text[1:2] 1:2", 146, 150),
    ]
    assert timeline.end_us == 180
    assert timeline.fill_ratio == 1.0

    short = StepShape(sizes=(2, 2), next_sizes=(2, 1), encoded=True)
    cut = simulate(plan, schedule_of(plan), profile, shape=short)
    assert [label for label, *_ in spans(cut, 1) if "text" in label] == ["text[0:2] 0:1"]
    last = StepShape(sizes=(2, 2), next_sizes=None, encoded=True)
    assert simulate(plan, schedule_of(plan), profile, shape=last).total_us(Activity.FROZEN) == 0


def test_gradients_are_summed_as_a_ring_from_the_last_backward_on_under_leftover_work() -> None:
    ring = Link(latency_us=1000, bytes_per_s=10**9)
    profile = model_profile(
        [10, 10], frozen=(TEXT,), width=0, allreduce=ring, trained_bytes=10**6, optimizer_us=70,
        overhead_us=9,
    )  # fmt: skip
    plan = make_plan(
        profile, world_size=6, num_stages=2, batch_size=4, num_microbatches=2, fill=False
    )
    shape = StepShape(sizes=(4, 4), next_sizes=(4, 4), encoded=True)
    sync_us = 1000 + 1334  # latency, and 2 x 2/3 of a megabyte at a byte a nanosecond
    timeline = run(plan, profile)
    last = op_span(timeline, "1B1").end_us
    end = op_span(timeline, "0B1").end_us + sync_us + 70
    assert spans(timeline, 1)[-3:] == [
        ("gradients", last, last + sync_us),
        ("optimizer", last + sync_us, last + sync_us + 70),
        ("overhead", end, end + 9),
    ]
    leftover = Fill(
        device=1, after=Op.parse("1B1"), component="text", start=0, stop=2, first=0, last=4
    )
    busy = simulate(replace(plan, fills=(leftover,)), schedule_of(plan), profile, shape=shape)
    assert spans(busy, 1)[-3] == ("gradients", last + 40, last + sync_us)
    assert busy.end_us == timeline.end_us


def test_an_accumulation_step_neither_sums_nor_steps() -> None:
    profile = model_profile([10, 10], optimizer_us=70)
    plan = make_plan(profile, world_size=4, num_stages=2, batch_size=2, num_microbatches=2)
    shape = StepShape(sizes=(2, 2), encoded=True, reduce=False)
    timeline = simulate(plan, schedule_of(plan), profile, shape=shape)
    assert timeline.total_us({Activity.SYNC, Activity.OPTIMIZER}) == 0


def test_without_training_only_forwards_run() -> None:
    profile = model_profile([10, 10], width=0, optimizer_us=70)
    plan = plan_for(profile, 2, 2, 2)
    shape = StepShape(sizes=(2, 2), encoded=True, training=False)
    timeline = simulate(plan, schedule_of(plan), profile, shape=shape)
    assert {s.activity for s in timeline.spans} == {Activity.FORWARD}
    assert timeline.end_us == 3 * 20


def test_uneven_local_batches_are_cut_like_tensor_split() -> None:
    profile = model_profile([10, 10], width=0)
    plan = plan_for(profile, 2, 4, 3)
    shape = StepShape(sizes=(4, 3), encoded=True)
    timeline = simulate(plan, schedule_of(plan), profile, shape=shape)
    assert [op_span(timeline, f"1F{m}").length_us for m in range(3)] == [30, 20, 20]


def test_a_stage_on_two_devices_splits_each_microbatch_and_sends_only_what_is_read() -> None:
    link = Link(latency_us=0, bytes_per_s=1_000_000)
    profile = model_profile([10, 10], p2p=link)
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=((2, 1, 0),),
        stages=(
            Stage(backbone="net", start=0, stop=1, devices=(0, 1)),
            Stage(backbone="net", start=1, stop=2, devices=(2,)),
        ),
        num_microbatches=1,
        batch_size=1,
        schedule="1f1b",
    )
    schedule = Schedule.parse("0F0 0B0\n0F0 0B0\n1F0 1B0")
    shape = StepShape(sizes=(1, 1, 1), encoded=True)
    timeline = simulate(plan, schedule, profile, shape=shape)
    # Two rows and one row of 32 bytes, on edges of their own.
    assert spans(timeline, 0)[0] == ("0F0", 0, 20)
    assert spans(timeline, 1)[0] == ("0F0", 0, 10)
    assert op_span(timeline, "1F0").start_us == 20 + 64
    assert op_span(timeline, "1F0").length_us == 30


def test_two_stages_on_one_device_pass_values_at_once() -> None:
    profile = model_profile([10] * 4, p2p=Link(latency_us=100, bytes_per_s=1_000, host_us=50))
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=((0,),),
        stages=tuple(Stage(backbone="net", start=i, stop=i + 2, devices=(0,)) for i in (0, 2)),
        num_microbatches=1,
        batch_size=1,
        schedule="1f1b",
    )
    timeline = simulate(plan, Schedule.parse("0F0 1F0 1B0 0B0"), profile)
    # A value that stays at home is no message: no latency, and nothing for the host.
    assert [(label, end) for label, _, end in spans(timeline, 0)] == [
        ("0F0", 20), ("1F0", 40), ("1B0", 80), ("0B0", 120)
    ]  # fmt: skip


def test_recompute_adds_a_forward_to_the_backward_and_a_split_backward_returns_early() -> None:
    profile = model_profile([10, 10], width=0)
    plan = plan_for(profile, 2, 1, 1)
    plan = replace(plan, stages=tuple(replace(s, recompute=True) for s in plan.stages))
    timeline = simulate(plan, Schedule.parse("0F0 0B0\n1F0 1I0 1W0"), profile)
    assert op_span(timeline, "0B0").length_us == 2 * (20 + 10)
    assert op_span(timeline, "1I0").length_us == 2 * (10 + 10)
    assert op_span(timeline, "1W0").length_us == 2 * 10
    assert op_span(timeline, "0B0").start_us == op_span(timeline, "1I0").end_us


def test_ops_that_wait_in_a_circle_are_named() -> None:
    profile = model_profile([10, 10])
    plan = plan_for(profile, 2, 1, 1)
    with pytest.raises(ScheduleError, match=r"device 0 waits for ever: op 0B0 .* message of 1B0"):
        simulate(plan, Schedule.parse("0B0 0F0\n1F0 1B0"), profile)


def test_frozen_ops_in_a_schedule_are_refused() -> None:
    profile = model_profile([10])
    plan = plan_for(profile, 1, 1, 1)
    with pytest.raises(ScheduleError, match=r"op 0N0 on device 0 is frozen work"):
        simulate(plan, Schedule.parse("0F0 0N0 0B0"), profile)


@pytest.mark.parametrize("sizes", [(2,), (1, 0), (1, 1, 1)])
def test_a_shape_that_does_not_fit_is_refused_with_the_numbers(sizes: tuple[int, ...]) -> None:
    profile = model_profile([10, 10])
    plan = plan_for(profile, 2, 2, 2)
    with pytest.raises(PlanError, match=rf"{len(sizes)} local batches with {sum(sizes)} samples"):
        simulate(plan, schedule_of(plan), profile, shape=StepShape(sizes=sizes, encoded=True))

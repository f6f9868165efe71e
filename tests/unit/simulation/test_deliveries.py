"""What delivering the next batch's rows costs, against sums by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.fills import MIN_CHUNK_BYTES, Run
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.core.program import SendRows, StepShape
from lightning_dpipe.core.timeline import Activity, Timeline
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.lowering.rows import layout
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.deliveries import Deliveries, num_messages
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile

TEXT = FrozenChain(name="text", forward_us=(6, 4))
BYTES = 32  # of one sample of every value


def plan_of(profile: Profile, fills: tuple[Fill, ...] = (), batch_size: int = 4) -> Plan:
    plan = make_plan(profile, world_size=2, batch_size=batch_size, num_microbatches=2, fill=False)
    return replace(plan, fills=fills)


def put(device: int, after: str | None, rows: tuple[int, int], owner: int | None = None) -> Fill:
    return Fill(
        device=device, after=None if after is None else Op.parse(after), component="text",
        start=0, stop=2, first=rows[0], last=rows[1], owner=owner,
    )  # fmt: skip


def run(plan: Plan, profile: Profile) -> Timeline:
    return simulate(plan, schedule_of(plan), profile)


def labels(timeline: Timeline, device: int) -> list[tuple[str, int, int]]:
    return [(s.label, s.start_us, s.end_us) for s in timeline.spans if s.device == device]


def test_every_message_of_the_program_is_charged_to_the_host_that_sends_it() -> None:
    """Random shares: sends of the lowered programs, counted, against `host_us`."""
    link = Link(latency_us=0, bytes_per_s=10**9, host_us=1000, host_bytes_per_s=10**6)
    profile = model_profile([10] * 4, frozen=(TEXT,), p2p=link)
    for first in range(5):
        fills = (
            put(0, "0F0", (0, 4)),
            *([put(0, "0F1", (first, 4), owner=1)] if first < 4 else []),
            *([put(1, None, (0, first))] if first else []),
        )
        plan = plan_of(profile, fills)
        shape = StepShape(sizes=(4, 4), next_sizes=(4, 4), encoded=True)
        programs = lower(plan, schedule_of(plan), profile.graph, shape)
        sent = [
            [x.message.shape[0] * BYTES for x in p.instructions if isinstance(x, SendRows)]
            for p in programs
        ]
        wanted = tuple(sum(link.send_us(n) for n in sizes) for sizes in sent)
        runs = [Run(0, 0, 0, 4), Run(1, 1, 0, first), Run(1, 0, first, 4)]
        runs = [r for r in runs if r.first < r.last]
        found = Deliveries(plan=plan, profile=profile, sizes=(4, 4)).host_us(runs)
        assert found == wanted, f"device 1 keeps {first} samples"
        timeline = run(plan, profile)
        assert timeline.total_us(Activity.HOST) == sum(wanted)


@given(
    rows=st.integers(1, 64),
    kilobytes=st.sampled_from([1, 20, 100, 256, 1000]),
    microbatches=st.integers(1, 16),
)
def test_the_number_of_messages_is_that_of_the_layout(
    rows: int, kilobytes: int, microbatches: int
) -> None:
    """Exact where micro-batches are equal; messages differ by a rounding elsewhere."""
    cut = layout((rows,), (0,), min(rows, microbatches))
    shares = [(0, cut.rows(m)) for m in range(cut.num_microbatches)]
    exact = len(cut.chunks(0, shares, kilobytes * 1024))
    found = num_messages(rows, kilobytes * 1024, microbatches)
    if rows % microbatches == 0:
        assert found == exact
    assert 0.5 * exact <= found <= 2 * exact


def test_the_threshold_below_which_messages_are_joined() -> None:
    half = MIN_CHUNK_BYTES // 2
    assert num_messages(8, MIN_CHUNK_BYTES, 8) == 8
    assert num_messages(8, half, 8) == 4
    assert num_messages(8, 1, 8) == 1


def test_the_next_step_waits_for_rows_that_are_encoded_last() -> None:
    long = FrozenChain(name="text", forward_us=(600, 400))
    link = Link(latency_us=500, bytes_per_s=1_000_000)  # a byte a microsecond
    profile = model_profile([10, 10], frozen=(long,), p2p=link)
    for after, rows in (("1B1", (0, 4)), ("1B1", (2, 4))):
        early = [put(1, None, (0, 2))] if rows[0] else []
        plan = plan_of(profile, (put(0, "0F1", (0, 4)), *early, put(1, after, rows)))
        timeline = run(plan, profile)
        last = max(s.end_us for s in timeline.spans if s.device == 1)
        arrives_us = last + 500 + (rows[1] - rows[0]) * BYTES
        # Samples 2 and 3 are of micro-batch 1, which stage 0 begins after 40 us.
        microbatch = 1 if rows[0] else 0
        starts_us = next(s.start_us for s in timeline.spans if s.label == f"0F{microbatch}")
        assert starts_us == (40 if rows[0] else 0)
        assert timeline.end_us == arrives_us - starts_us
    at_once = replace(profile, p2p=replace(link, latency_us=0, bytes_per_s=10**15))
    timeline = run(plan, at_once)
    assert timeline.end_us == max(s.end_us for s in timeline.spans if s.device == 1)


def test_a_guest_waits_for_its_fields() -> None:
    link = Link(latency_us=70, bytes_per_s=1_000_000)  # a byte a microsecond
    profile = model_profile([10, 10], frozen=(TEXT,), p2p=link, fill_us=5)
    plan = plan_of(
        profile, (put(0, None, (1, 4), owner=1), put(0, "0F1", (0, 4)), put(1, None, (0, 1)))
    )
    fields_us = 70 + 3 * BYTES
    found = labels(run(plan, profile), 0)
    assert found[:2] == [
        ("wait text[0:2] 1:4 of 1", 0, fields_us),
        ("text[0:2] 1:4 of 1", fields_us, fields_us + 5 + 3 * 10),
    ]
    assert ("text[0:2] 0:1", 0, 5 + 10) in labels(run(plan, profile), 1)


def test_moving_shortens_an_uneven_pipeline_by_the_time_of_the_samples_moved() -> None:
    """Stage 0 has three quarters of the layers: device 1 idles while device 0 has work left."""
    frozen = (FrozenChain(name="text", forward_us=(250,) * 6),)
    profile = model_profile([400] * 8, frozen=frozen, width=0, fill_us=50)
    plan = make_plan(
        profile, world_size=2, batch_size=16, num_microbatches=4, cuts=(6,), fill=False
    )
    from lightning_dpipe.planning.filling import fill

    schedule = schedule_of(plan)
    still, moved = (
        replace(plan, fills=fill(plan, schedule, profile, move=move)) for move in (False, True)
    )
    before_us, after_us = run(still, profile).end_us, run(moved, profile).end_us
    samples = {i for f in moved.fills if f.owner == 0 for i in range(f.first, f.last)}
    # Device 0 never idles before its ops end: what it keeps is left over, in full.
    kept_us = (16 - len(samples)) * 1500 + (50 if len(samples) < 16 else 0)
    path_us = run(replace(plan, fills=()), profile).end_us - 16 * 1500 - 50
    gain_us = 16 * 1500 + 50 - kept_us
    assert before_us - after_us == pytest.approx(gain_us, rel=0.01), (
        f"moving {len(samples)} of 16 samples ends the iteration at {after_us / 1e3:.2f} ms "
        f"instead of {before_us / 1e3:.2f} ms: {(before_us - after_us) / 1e3:.2f} ms earlier, "
        f"predicted {gain_us / 1e3:.2f} ms; the pipeline alone takes {path_us / 1e3:.2f} ms"
    )
    assert len(samples) >= 8
    assert after_us == pytest.approx(path_us, rel=0.01)

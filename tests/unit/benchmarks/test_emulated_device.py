"""The clock of an emulated device, against a fake host; whole emulations, against the simulator."""

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import emulated_device
from benchmarks.emulated_device import (
    DeviceClock,
    EmulatedReducer,
    Reductions,
    bind_emulated,
    emulated_link,
    small,
)
from benchmarks.emulation import Case, emulate
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.core.program import Channel, Lane, Message
from lightning_dpipe.core.timeline import Activity, Timeline
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan, with_fills
from lightning_dpipe.runtime.stage import Saved, StageRunner
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile

MS = 1000


class Host:
    """A fake host that oversleeps by `late_s` each time."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 100.0, late_s
        self.naps: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds)
        self.now_s += seconds + self.late_s

    def device(self, scale: float = 1.0) -> DeviceClock:
        clock = DeviceClock(scale=scale, clock=self.clock, sleep=self.sleep)
        clock.start(self.now_s)
        return clock


@settings(deadline=None)
@given(
    ops=st.lists(
        st.tuples(st.lists(st.integers(0, 50 * MS), min_size=1, max_size=6), st.floats(0, 0.02)),
        min_size=1,
        max_size=12,
    ),
    late_s=st.floats(0, 0.05),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_ops_end_when_their_costs_add_up_however_late_the_host_is(
    ops: list[tuple[list[int], float]], late_s: float, scale: float
) -> None:
    host = Host(late_s)
    clock = host.device(scale)
    total_us = 0
    for layers, busy_s in ops:
        for microseconds in layers:
            clock.spend(microseconds)
        host.now_s += busy_s  # what Python does inside the op
        naps = len(host.naps)
        clock.settle()
        total_us += sum(layers)
        assert clock.until_s == pytest.approx(100.0 + total_us * 1e-6 * scale)
        assert host.now_s >= clock.until_s - 1e-9, "no op ends before its time"
        assert len(host.naps) <= naps + 1, "one sleep an op"
    # Late by one sleep, and by what Python did beyond the time there was for it.
    worst_s = late_s + sum(busy_s for _, busy_s in ops)
    assert host.now_s <= clock.until_s + worst_s + 1e-9


def test_lateness_of_a_sleep_is_taken_off_the_next_and_overhead_is_part_of_the_op() -> None:
    host = Host(late_s=0.003)
    clock = host.device()
    for expected_nap_s, end_s in ((0.010, 100.013), (0.007, 100.023), (0.003, 100.033)):
        if end_s > 100.03:
            host.now_s += 0.004
        clock.spend(10 * MS)
        clock.settle()
        assert host.naps[-1] == pytest.approx(expected_nap_s)
        assert host.now_s == pytest.approx(end_s)


def test_after_a_wait_the_device_goes_on_from_the_arrival_not_from_the_hosts_time() -> None:
    host = Host()
    clock = host.device()
    clock.resume(100.5)  # arrived
    host.now_s = 100.6  # woke up late
    clock.spend(200 * MS)
    clock.settle()
    assert host.now_s == pytest.approx(100.7)
    clock.resume(100.1)  # had arrived long ago
    assert clock.until_s == pytest.approx(100.7)


def test_jitter_is_a_factor_on_the_whole_op() -> None:
    host = Host()
    clock = host.device()
    clock.spend(10 * MS)
    clock.spend(30 * MS)
    clock.settle(1.5)
    assert host.now_s == pytest.approx(100.06)


@settings(deadline=None, max_examples=30)
@given(
    times=st.lists(st.integers(1, 900), min_size=3, max_size=6),
    rows=st.integers(1, 40),
    start=st.integers(0, 2),
)
def test_a_stage_costs_what_the_profile_says_forward_and_backward(
    times: list[int], rows: int, start: int
) -> None:
    profile = model_profile(times, [3 * t for t in times], skips=[(0, 2)])
    host = Host()
    clock = host.device()
    graph = small(profile.graph)
    stop = len(times)
    stages = [Stage(backbone="net", start=start, stop=stop, devices=(0,))]
    if start:
        stages.insert(0, Stage(backbone="net", start=0, stop=start, devices=(1,)))
    index = len(stages) - 1
    runner = StageRunner(
        graph, stages, index, bind_emulated(graph, profile, clock), torch.device("cpu")
    )
    assert runner.loss is not None
    reads = {v for layer in (*runner.layers, runner.loss) for v in layer.reads}
    written = {v for layer in runner.layers for _, v in layer.writes}
    inputs = {v: torch.ones(rows, *graph.values[v].shape) for v in reads - written}
    saved = Saved()
    env = runner.forward(inputs, saved, None)
    clock.settle()
    forward_us = profile.forward_us("net", start, stop, rows)
    assert host.now_s == pytest.approx(100.0 + forward_us * 1e-6)
    saved.loss = runner.loss.fn(*[env[v] for v in runner.loss.reads])
    runner.backward(saved, {}, torch.ones(rows), [])
    clock.settle()
    backward_us = profile.backward_us("net", start, stop, rows)
    assert host.now_s == pytest.approx(100.0 + (forward_us + backward_us) * 1e-6)
    assert all(p.grad is not None for p in runner.parameters)


def test_links_weigh_the_models_values_not_the_emulated_ones() -> None:
    link = Link(latency_us=100, bytes_per_s=10**6)
    profile = model_profile([1, 1], width=1000, p2p=link)
    delay = emulated_link(profile, scale=2.0)
    value = 1  # h0: 1000 float32 a sample
    message = Message(
        channel=Channel(source=0, target=1, lane=Lane.PIPELINE),
        tag="h",
        shape=(3, *small(profile.graph).values[value].shape),
        dtype="float32",
    )
    assert delay.bytes_of is not None
    assert delay.bytes_of(message) == 3 * 4000
    assert delay.latency_s == pytest.approx(200e-6)
    assert 3 * 4000 / delay.bytes_per_s == pytest.approx(2 * 12e-3)


def test_a_gradient_sum_starts_with_the_last_replica_and_lasts_as_a_ring() -> None:
    profile = model_profile(
        [1] * 4, trained_bytes=10**6, allreduce=Link(latency_us=5, bytes_per_s=10**9)
    )
    plan = Plan(
        graph_digest="",
        profile_digest="",
        groups=default_groups(4, 2),
        stages=(Stage(backbone="net", start=0, stop=4, devices=(0, 1)),),
        num_microbatches=1,
        batch_size=1,
        schedule="1f1b",
    )
    sums = Reductions(ThreadHub(2, timeout_s=10.0), plan, profile, 2.0)
    ends = {}

    def replica(device: int) -> None:
        host = Host()
        host.now_s += device
        clock = host.device()
        reducer = EmulatedReducer(sums, 0, clock)
        for _ in range(2):  # rounds do not mix
            reducer.start([])
            reducer.wait()
            ends[device] = host.now_s

    threads = [threading.Thread(target=replica, args=(d,)) for d in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    ring_s = 2.0 * (5e-6 + 2 * 3 / 4 * 4e-3)  # four replicas: two groups of two
    assert ends == {d: pytest.approx(101.0 + 2 * ring_s) for d in range(2)}


def ops_of(timeline: Timeline) -> dict[tuple[int, Op], tuple[int, int]]:
    return {(s.device, s.op): (s.start_us, s.end_us) for s in timeline.spans if s.op is not None}


def frozen_of(timeline: Timeline) -> set[tuple[int, str]]:
    return {(s.device, s.label) for s in timeline.spans if "[" in s.label}


PROFILE = model_profile(
    [300, 200, 400, 100, 250, 150],
    skips=[(0, 5), (1, 4)],
    frozen=(
        FrozenChain(name="text", forward_us=(90, 110), fixed_us=50),
        FrozenChain(name="noise", forward_us=(40,), after=("text",)),
    ),
    optimizer_us=300,
    p2p=Link(latency_us=50, bytes_per_s=10**6),
    allreduce=Link(latency_us=100, bytes_per_s=10**8),
)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (2, 4), (3, 4)])
@pytest.mark.parametrize("fill", [False, "auto", "whole", "paper"])
def test_the_engine_on_emulated_devices_does_what_the_simulator_says(
    num_stages: int, num_microbatches: int, fill: bool | str
) -> None:
    plan = make_plan(
        PROFILE,
        world_size=num_stages,
        batch_size=4,
        num_microbatches=num_microbatches,
        fill=fill,
    )
    check(plan, PROFILE)


@pytest.mark.parametrize("replicas", [((0, 1), (2,)), ((0,), (1, 2))])
def test_replicated_stages_too_with_their_gradient_sums(
    replicas: tuple[tuple[int, ...], ...],
) -> None:
    plan = make_plan(PROFILE, world_size=2, batch_size=4, num_microbatches=3)
    stages = [replace(s, devices=d) for s, d in zip(plan.stages, replicas, strict=True)]
    plan = replace(plan, stages=tuple(stages), groups=default_groups(6, 3))
    check(with_fills(plan, PROFILE), PROFILE)


def check(plan: Plan, profile: Profile) -> None:
    """Every op starts and ends when the simulator says, and the same frozen work runs."""
    said = simulate(plan, schedule_of(plan), profile)
    (measured,) = emulate(profile, {"it": Case(plan=plan)}, rounds=1)["it"]
    found, expected = ops_of(measured), ops_of(said)
    assert found.keys() == expected.keys()
    for key, times in expected.items():
        assert found[key] == pytest.approx(times, abs=20), f"device and op {key}"
    assert frozen_of(measured) == frozen_of(said)
    for activity in (Activity.SYNC, Activity.OPTIMIZER):
        assert measured.total_us(activity) == pytest.approx(said.total_us(activity), abs=60)
    assert measured.end_us >= said.end_us - 20, "the host's clock is never ahead"


def test_a_device_that_fails_ends_the_emulation_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(PROFILE, world_size=2, batch_size=4, num_microbatches=2)
    work = emulated_device.EmulatedTracer.work

    def failing(self, start, activity, label, op=None) -> None:  # type: ignore[no-untyped-def]
        if op == Op.parse("1B1"):
            raise ValueError("out of paper")
        work(self, start, activity, label, op)

    monkeypatch.setattr(emulated_device.EmulatedTracer, "work", failing)
    with pytest.raises(ValueError, match="out of paper"):
        emulate(PROFILE, {"it": Case(plan=plan)}, rounds=1)

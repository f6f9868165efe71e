"""Emulated devices: the real engine over threads, with layers that take their profiled time.

In:     a Profile (measured or estimated) and plans made from it.
Out:    measured timelines of real sessions, one thread per device (`emulated_device`), the plans in
        turn, so that whatever else the host does falls on all of them.
"""

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from benchmarks.emulated_device import (
    CPU,
    DeviceClock,
    EmulatedReducer,
    EmulatedTracer,
    EmulatedTransport,
    Reductions,
    bind_emulated,
    emulated_link,
    small,
)
from lightning_dpipe.core.errors import RankError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Activity, Timeline
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.runtime.trace import Record, StepTrace, merge
from lightning_dpipe.strategy.assemble import PipelineSession
from tests.ranks import run_threads

TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to run; `jitter` is the sigma of a lognormal factor of mean 1 on each op's time."""

    plan: Plan
    jitter: float = 0.0


@dataclass
class _Device:
    """One device: a session per case over one transport."""

    profile: Profile
    cases: Mapping[str, Case]
    rank: int
    transport: EmulatedTransport
    clock: DeviceClock
    reductions: Mapping[str, Reductions]
    sessions: dict[str, PipelineSession] = field(default_factory=dict)
    tracers: dict[str, EmulatedTracer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = small(self.profile.graph)
        self.binding = bind_emulated(graph, self.profile, self.clock)
        self.fields = graph.inputs
        for name, case in self.cases.items():
            plan = replace(case.plan, graph_digest=digest(graph))
            _, position = plan.locate(self.rank)
            session = PipelineSession(
                graph=graph,
                binding=self.binding,
                plan=plan,
                rank=self.rank,
                transport=self.transport,
                device=CPU,
                seed=0,
                reducer=_reducer(plan, position, self.reductions[name], self.clock),
            )
            tracer = EmulatedTracer(self.rank, position, self.clock)
            session.engine.tracer = tracer
            self.sessions[name], self.tracers[name] = session, tracer

    def step(self, name: str, index: int, at_s: float) -> StepTrace:
        """One whole iteration of a case, from a start that is common to all devices."""
        session, tracer, case = self.sessions[name], self.tracers[name], self.cases[name]
        plan, graph = session.plan, session.graph
        draw = random.Random(f"{index}/{self.rank}")
        sigma = case.jitter
        tracer.jitter = lambda: draw.lognormvariate(-(sigma**2) / 2, sigma) if sigma else 1.0
        sizes = (plan.batch_size,) * plan.num_devices
        batch = {
            graph.values[v].name: torch.zeros(plan.batch_size, *graph.values[v].shape)
            for v in self.fields
        }
        ahead = bool(plan.fills)
        self.clock.start(at_s)
        result = session.step(
            batch,
            sizes=sizes,
            batch_index=index,
            loss_scale=1.0,
            next_batch=batch if ahead else None,
            next_sizes=sizes if ahead else None,
        )
        assert result.trace is not None
        self._finish(session, result.trace)
        return result.trace

    def _finish(self, session: PipelineSession, trace: StepTrace) -> None:
        """Wait for the gradient sums and step the optimizer; the end is by the host's clock."""
        tracer = session.engine.tracer
        assert tracer is not None
        marks = [tracer.mark()]
        session.wait_reduction()
        marks.append(tracer.mark())
        for stage in map(session.plan.stages.__getitem__, session.stages):
            self.clock.spend(self.profile.optimizer_us(stage.backbone, stage.start, stage.stop))
        self.clock.settle()
        marks.append(tracer.mark())
        trace.records += [
            Record(marks[0], marks[1], Activity.SYNC, "gradients", None),
            Record(marks[1], marks[2], Activity.OPTIMIZER, "optimizer", None),
        ]
        trace.end_ns = time.monotonic_ns()
        for runner in session.stages.values():
            for parameter in runner.parameters:
                parameter.grad = None


def _reducer(
    plan: Plan, position: int, reductions: Reductions, clock: DeviceClock
) -> EmulatedReducer | None:
    """Sums the gradients of a device's only stage; several stages must have nothing to sum."""
    first, *others = plan.stages_on(position)
    if not others:
        return EmulatedReducer(reductions, first, clock)
    for stage in (first, *others):
        replicas = len(plan.groups) * len(plan.stages[stage].devices)
        if replicas > 1:
            raise ValueError(
                f"device {position} holds {1 + len(others)} stages with {replicas} replicas; "
                "emulated devices sum gradients for one stage each"
            )
    return None


def emulate(
    profile: Profile,
    cases: Mapping[str, Case],
    *,
    rounds: int,
    scale: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, list[Timeline]]:
    """Run steady iterations of one pipeline group, the cases in turn, each round in other order.

    Args:
        profile: Times and links of the emulated devices, for a model without self-conditioning.
        cases: Plans made from `profile`, for groups of one size; a device with several stages
            has no replicas.
        rounds: Iterations of each case. Jitter differs by round, not by case.
        scale: Factor on all times; the timelines are as measured.
        progress: Called with the number of rounds done.

    Returns:
        By case, the measured timelines.
    """
    num_devices = next(iter(cases.values())).plan.num_devices
    hub = ThreadHub(num_devices, delay=emulated_link(profile, scale), timeout_s=TIMEOUT_S)
    reductions = {name: Reductions(hub, c.plan, profile, scale) for name, c in cases.items()}
    started_s = [0.0]

    def now() -> None:
        gc.collect()
        started_s[0] = time.monotonic()

    barrier = threading.Barrier(num_devices, action=now)
    order = [name for i in range(rounds) for name in _turn(list(cases), i)]

    def ready() -> None:
        try:
            barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            hub.check()
            raise RankError(f"a device did not come to its next step in {TIMEOUT_S} s") from error

    def body(rank: int, _: ThreadHub) -> dict[str, list[StepTrace]]:
        try:
            return steps(rank)
        except BaseException as error:
            hub.abort(error, rank)
            barrier.abort()
            raise

    def steps(rank: int) -> dict[str, list[StepTrace]]:
        clock = DeviceClock(scale=0.0)
        transport = EmulatedTransport(hub, rank, clock, profile.p2p.host_us)
        device = _Device(profile.on(rank), cases, rank, transport, clock, reductions)
        for name in [*cases, *cases]:  # programs are lowered, the first batch is encoded: no time
            ready()
            device.step(name, 0, 0.0)
        clock.scale = scale
        traces: dict[str, list[StepTrace]] = {name: [] for name in cases}
        for i, name in enumerate(order):
            ready()
            traces[name].append(device.step(name, i // len(cases), started_s[0]))
            if rank == 0 and progress is not None and (i + 1) % len(cases) == 0:
                progress((i + 1) // len(cases))
        return traces

    with _quiet_threads():
        by_rank = run_threads(body, num_devices, hub=hub, timeout_s=TIMEOUT_S)
    return {
        name: [merge([traces[name][i] for traces in by_rank]) for i in range(rounds)]
        for name in cases
    }


def _turn(names: list[str], index: int) -> list[str]:
    """Start with another one each round, and go the other way every second round."""
    at = (index // 2) % len(names)
    turned = names[at:] + names[:at]
    return turned[::-1] if index % 2 else turned


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Hand the interpreter over quickly, and collect garbage between iterations only."""
    interval_s, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(2e-4)
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        torch.set_num_threads(threads)
        gc.enable()

"""Emulated devices that train on batches of several shape classes.

As `benchmarks.emulated_device`, with values whose width also tells the class: value i of class k
has ``i + 1 + k * num_values`` numbers a sample. A layer takes the time of the class of what it
reads, and a link weighs a message by the bytes of its class.
"""

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.emulated_device import (
    CPU,
    DeviceClock,
    EmulatedTracer,
    EmulatedTransport,
    bind_emulated,
    small,
)
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.program import Message
from lightning_dpipe.runtime.bound import Binding, BoundLayer
from lightning_dpipe.runtime.threads import Delay, ThreadHub
from lightning_dpipe.runtime.trace import StepTrace, merge
from lightning_dpipe.strategy.assemble import FillsOf, PipelineSession
from tests.ranks import run_threads

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class OfClass:
    """One layer of all classes: runs the one whose class its first input is of."""

    layers: tuple[Callable[..., Any], ...]
    num_values: int

    def __call__(self, *inputs: Tensor) -> Any:
        return self.layers[(inputs[0].shape[1] - 1) // self.num_values](*inputs)


def graphs_of(profiles: Mapping[str, Profile]) -> dict[str, ModelGraph]:
    """A graph of few numbers per class, widths as the module says."""
    found = {}
    for index, (name, profile) in enumerate(profiles.items()):
        graph = small(profile.graph)
        more = index * len(graph.values)
        values = tuple(replace(v, shape=(v.shape[0] + more,)) for v in graph.values)
        found[name] = replace(graph, values=values)
    return found


def bind_classes(
    graphs: Mapping[str, ModelGraph], profiles: Mapping[str, Profile], clock: DeviceClock
) -> Binding:
    """One binding for all classes: the base's layers and weights, each class's times."""
    bindings = [bind_emulated(g, profiles[name], clock) for name, g in graphs.items()]
    base, num_values = bindings[0], len(graphs[BASE].values)

    def joined(component: str, index: int) -> BoundLayer:
        layer = base.layers[component][index]
        layers = [b.layers[component][index].fn for b in bindings]
        shared = tuple(replace(fn, weight=layer.fn.weight) for fn in layers)
        return replace(layer, fn=OfClass(shared, num_values))

    layers = {
        component: tuple(joined(component, i) for i in range(len(chain)))
        for component, chain in base.layers.items()
    }
    return replace(base, layers=layers)


def link_of(profiles: Mapping[str, Profile], scale: float) -> Delay:
    """The base's point-to-point link, `scale` times slower."""
    sizes = [v.bytes_per_sample for p in profiles.values() for v in p.graph.values]
    p2p = profiles[BASE].p2p

    def bytes_of(message: Message) -> int:
        rows, width = message.shape
        return rows * sizes[width - 1]

    return Delay(
        latency_s=p2p.latency_us * 1e-6 * scale,
        bytes_per_s=p2p.bytes_per_s / scale,
        bytes_of=bytes_of,
    )


def run_buckets(
    profiles: Mapping[str, Profile],
    plan: Plan,
    fills: FillsOf,
    walk: Sequence[str],
    *,
    scale: float,
    progress: Callable[[str], None],
) -> list[float]:
    """Train on batches of the classes in `walk`, each encoded in the step before it.

    Args:
        profiles: By class, the base first.
        plan: Its cut serves all classes; one stage a device. Optimizer steps are not part of it.
        fills: By pair of classes.
        walk: Class of each batch; the last one is encoded and not trained on.
        scale: Factor on all times.
        progress: Told what has been done.

    Returns:
        Measured iterations in microseconds, one less than `walk` has entries.
    """
    graphs = graphs_of(profiles)
    plan = replace(plan, graph_digest=digest(graphs[BASE]), groups=plan.groups[:1])
    hub = ThreadHub(plan.num_devices, delay=link_of(profiles, scale), timeout_s=TIMEOUT_S)
    started_s = [0.0]

    def now() -> None:
        gc.collect()
        started_s[0] = time.monotonic()

    barrier = threading.Barrier(plan.num_devices, action=now)

    def body(rank: int, _: ThreadHub) -> list[StepTrace]:
        clock = DeviceClock(scale=0.0)
        transport = EmulatedTransport(hub, rank, clock, profiles[BASE].p2p.host_us)
        session = PipelineSession(
            graph=graphs[BASE], binding=bind_classes(graphs, profiles, clock), plan=plan,
            rank=rank, transport=transport, device=CPU, seed=0, fills=fills,
            buckets={name: g for name, g in graphs.items() if name != BASE},
        )  # fmt: skip
        session.engine.tracer = EmulatedTracer(rank, session.position, clock)
        try:
            found = _steps(session, plan, walk, lambda: barrier.wait(TIMEOUT_S), clock, started_s)
            session.forget()
            clock.scale = scale
            found = _steps(session, plan, walk, lambda: barrier.wait(TIMEOUT_S), clock, started_s)
        except BaseException as error:
            hub.abort(error, rank)
            barrier.abort()
            raise
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        progress(f"{len(walk)} batches of {len(profiles)} classes on {plan.num_devices} devices")
        traces = run_threads(body, plan.num_devices, hub=hub, timeout_s=TIMEOUT_S)
    finally:
        torch.set_num_threads(threads)
    return [merge([t[i] for t in traces]).end_us for i in range(1, len(walk))]


def _steps(
    session: PipelineSession,
    plan: Plan,
    walk: Sequence[str],
    ready: Callable[[], object],
    clock: DeviceClock,
    started_s: Sequence[float],
) -> list[StepTrace]:
    """A step that encodes its own batch up front, then one per pair of neighbours in `walk`."""
    sizes = (plan.batch_size,) * plan.num_devices
    found = []
    for index, (this, following) in enumerate(pairwise([walk[0], *walk])):
        ready()
        clock.start(started_s[0])
        result = session.step(
            _batch(session.graphs[this], plan.batch_size), sizes=sizes, batch_index=index,
            loss_scale=1.0, next_batch=_batch(session.graphs[following], plan.batch_size),
            next_sizes=sizes, reduce=False, bucket=this, next_bucket=following,
        )  # fmt: skip
        assert result.trace is not None
        clock.settle()
        result.trace.end_ns = time.monotonic_ns()  # late where the host could not keep up
        found.append(result.trace)
    return found


def _batch(graph: ModelGraph, rows: int) -> dict[str, Tensor]:
    return {graph.values[v].name: torch.zeros(rows, *graph.values[v].shape) for v in graph.inputs}

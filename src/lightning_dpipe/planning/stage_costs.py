"""What every contiguous stage of a backbone costs, as matrices over (first layer, last layer + 1).

In:     a Profile, and how one pipeline group cuts its batch (`Cutting`).
Out:    `StageTable`: times of all stages at once, for one number of replicas and one position.

A stage on r devices splits each micro-batch's rows among them; its first replica has the most, so
its times are the stage's. A stage recomputes its activations only where they do not fit otherwise:
recomputation never makes an iteration shorter. Entries of stages that cannot exist are infinite.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.profile import Profile, interpolate
from lightning_dpipe.planning.schedules import build_schedule
from lightning_dpipe.simulation.memory import MOMENTS_PER_WEIGHT

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How one pipeline group of `num_devices` works through its batch.

    `sizes` are the samples of each micro-batch, largest first (`split_sizes`). `num_groups` is how
    many such groups there are. `memory_bytes` is what a device may hold (None: any amount).
    """

    sizes: tuple[int, ...]
    num_devices: int
    num_groups: int
    schedule: str
    self_conditioned: bool = False
    memory_bytes: int | None = None

    @property
    def num_microbatches(self) -> int:
        """Parts of the group's batch."""
        return len(self.sizes)

    def shares(self, replicas: int) -> dict[int, int]:
        """Rows of a stage's first replica -> number of micro-batches of that size."""
        found: dict[int, int] = {}
        for size in self.sizes:
            share = -(-size // replicas)
            found[share] = found.get(share, 0) + 1
        return found

    def all_shares(self, replicas: int) -> dict[int, int]:
        """The same, of all its replicas."""
        found: dict[int, int] = {}
        for size in self.sizes:
            for share in split_sizes(size, replicas):
                if share:
                    found[share] = found.get(share, 0) + 1
        return found

    def in_flight(self, from_back: int) -> int:
        """Most micro-batches that a stage holds, `from_back` = 1 for the last stage."""
        return _in_flight(self.schedule, from_back, self.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Microseconds of every stage ``[start, stop)`` at one number of replicas and one position.

    `work`: all ops of its first replica. `total`: those of all replicas, with their optimizers.
    `first`: its first forward. `last`: its last backward. `sync`: gradient
    reduction. `step`: optimizer. `recompute`: where activations are computed again.
    """

    work: Array
    first: Array
    last: Array
    sync: Array
    step: Array
    recompute: NDArray[np.bool_]
    total: Array


class BackboneCosts:
    """Sums over layers at any number of rows; made once for a whole search."""

    def __init__(self, profile: Profile, backbone: str) -> None:
        self.profile, self.backbone = profile, backbone
        self.cost = profile.component(backbone)
        self.num_layers = len(self.cost.layers)
        self._times: dict[tuple[str, int], Array] = {}
        self._syncs: dict[int, Array] = {}
        self.step = _spans(np.array([x.optimizer_us for x in self.cost.layers]))
        self.trained_bytes = _spans(np.array([x.trained_bytes for x in self.cost.layers]))
        self.param_bytes = _spans(np.array([x.param_bytes for x in self.cost.layers]))
        self.resident_bytes = self.param_bytes + (1 + MOMENTS_PER_WEIGHT) * self.trained_bytes
        """Weights, gradients and moments of every stage."""
        self.frozen_bytes = sum(
            layer.param_bytes
            for component in profile.graph.frozen
            for layer in profile.component(component.name).layers
        )

    def at(self, what: str, rows: int) -> Array:
        """Sums of a LayerCost's per-size field at `rows` samples."""
        key = (what, rows)
        if key not in self._times:
            costs = [interpolate(self.cost.samples, getattr(x, what), rows) for x in self.layers]
            self._times[key] = _spans(np.array(costs))
        return self._times[key]

    @property
    def layers(self) -> Sequence[object]:
        """The layers' costs."""
        return self.cost.layers

    @cached_property
    def sequential(self) -> NDArray[np.bool_]:
        """Where ``start < stop``."""
        n = self.num_layers + 1
        return np.triu(np.ones((n, n), dtype=bool), 1)

    @cached_property
    def input_bytes(self) -> Array:
        """Bytes per sample of everything a stage reads from outside itself."""
        graph = self.profile.graph
        layers = graph.component(self.backbone).layers
        last = {v for loss in graph.losses if loss.backbone == self.backbone for v in loss.reads}
        if graph.feedback is not None and graph.feedback.backbone == self.backbone:
            last.update(graph.feedback.reads)
        n = self.num_layers
        table = np.zeros((n + 1, n + 1))
        for start in range(n):
            reads: set[int] = set()
            written: set[int] = set()
            for stop in range(start + 1, n + 1):
                reads.update(layers[stop - 1].reads)
                written.update(layers[stop - 1].writes)
                outside = (reads | last if stop == n else reads) - written
                table[start, stop] = sum(graph.values[v].bytes_per_sample for v in outside)
        return table

    @cached_property
    def border_bytes(self) -> tuple[tuple[int, int], ...]:
        """Per border k: bytes per sample that pass it forward and back in any cut at k.

        What layer k - 1 wrote and layer k reads crosses between neighbours wherever else one cuts.
        """
        graph = self.profile.graph
        layers = graph.component(self.backbone).layers
        found = [(0, 0)]
        for before, after in pairwise(layers):
            values = [graph.values[v] for v in set(before.writes) & set(after.reads)]
            back = sum(v.bytes_per_sample for v in values if v.requires_grad)
            found.append((sum(v.bytes_per_sample for v in values), back))
        return (*found, (0, 0))

    def sync(self, replicas: int) -> Array:
        """Ring all-reduce of a stage's gradients over `replicas` in all."""
        if replicas not in self._syncs:
            self._syncs[replicas] = np.zeros_like(self.trained_bytes)
            for n, link in self.profile.legs(replicas):
                num_bytes = np.ceil(2 * (n - 1) * self.trained_bytes / n)
                wire_us = np.ceil(num_bytes * 1e6 / link.bytes_per_s)
                self._syncs[replicas] += np.where(num_bytes > 0, link.latency_us + wire_us, 0.0)
        return self._syncs[replicas]

    def hops_us(self, cutting: Cutting, most_replicas: int) -> tuple[Array, Array]:
        """Per border: least time of the first message forward and of the last one back."""
        link = self.profile.p2p
        first = -(-cutting.sizes[0] // most_replicas)
        last = -(-cutting.sizes[-1] // most_replicas)
        times = [
            (link.transfer_us(forward * first), link.transfer_us(back * last))
            for forward, back in self.border_bytes
        ]
        return np.array([f for f, _ in times], float), np.array([b for _, b in times], float)

    def table(
        self, cutting: Cutting, *, replicas: int, from_back: int, limited: bool = True
    ) -> StageTable:
        """All stages on `replicas` devices, `from_back` stages before the end of the pipeline.

        With `limited` only those that fit into the cutting's memory.
        """
        if not limited:
            cutting = replace(cutting, memory_bytes=None)
        forwards = 2 if cutting.self_conditioned else 1
        shares = cutting.shares(replicas)
        forward = sum(n * self.at("forward_us", rows) for rows, n in shares.items())
        backward = sum(n * self.at("backward_us", rows) for rows, n in shares.items())
        last_rows = -(-cutting.sizes[-1] // replicas)
        first_forward = self.at("forward_us", -(-cutting.sizes[0] // replicas))
        last_backward = self.at("backward_us", last_rows)
        every = cutting.all_shares(replicas)
        forwards_of_all = sum(n * self.at("forward_us", rows) for rows, n in every.items())
        backwards_of_all = sum(n * self.at("backward_us", rows) for rows, n in every.items())
        again, allowed = self._memory(cutting, replicas, from_back)
        allowed &= self.sequential
        infinite = np.where(allowed, 0.0, np.inf)
        return StageTable(
            work=forwards * forward + backward + np.where(again, forward, 0.0) + infinite,
            first=first_forward,
            last=last_backward + np.where(again, self.at("forward_us", last_rows), 0.0),
            sync=self.sync(replicas * cutting.num_groups),
            step=self.step,
            recompute=again,
            total=forwards * forwards_of_all
            + backwards_of_all
            + np.where(again, forwards_of_all, 0.0)
            + replicas * self.step
            + infinite,
        )

    def _memory(
        self, cutting: Cutting, replicas: int, from_back: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Where a stage must recompute, and where it fits at all."""
        n = self.num_layers + 1
        if cutting.memory_bytes is None:
            return np.zeros((n, n), dtype=bool), np.ones((n, n), dtype=bool)
        plain, again = self.held_bytes(cutting, replicas, from_back)
        left = cutting.memory_bytes - self.frozen_bytes - self.resident_bytes
        return plain > left, np.minimum(plain, again) <= left

    def held_bytes(self, cutting: Cutting, replicas: int, from_back: int) -> tuple[Array, Array]:
        """Activations of every stage at their peak: kept, and computed again."""
        rows = [-(-size // replicas) for size in cutting.sizes[: cutting.in_flight(from_back)]]
        return self.held_bytes_of(rows)

    def held_bytes_of(self, rows: Sequence[int]) -> tuple[Array, Array]:
        """The same, with micro-batches of so many rows in flight, in any order."""
        kept: Array = np.sum([self.at("activation_bytes", r) for r in rows], axis=0)
        return kept, sum(rows) * self.input_bytes + self.at("activation_bytes", max(rows))


def _spans(costs: NDArray[np.int64]) -> Array:
    """``[start, stop]``: sum of ``costs[start:stop]`` (negative below the diagonal: unused)."""
    sums = np.concatenate(([0.0], np.cumsum(costs, dtype=np.float64)))
    spans: Array = sums[None, :] - sums[:, None]
    return spans


@lru_cache(maxsize=4096)
def _in_flight(name: str, num_stages: int, num_microbatches: int) -> int:
    """Most micro-batches that the first stage holds between forward and end of backward."""
    schedule = build_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches)
    order = schedule.orders[0]
    last = {op.microbatch: op for op in order}
    alive = most = 0
    for op in order:
        alive += op.kind is OpKind.F
        most = max(most, alive)
        alive -= op == last[op.microbatch]
    return most

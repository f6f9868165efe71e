"""Lower bounds on the iteration of pipelines that are cut in part, or not at all yet.

In:     the costs of all stages (`stage_costs`) and how a group cuts its batch.
Out:    for every rest of the backbone, number of stages and devices: three least times. With the
        stages chosen so far (`Prefix`) they bound the simulated iteration from below.

From the first forward of a chain of stages,
    path   until its first stage has run its last backward: the first stage's ops one after the
           other, or its first forward, the path of the stages behind it, and its last backward,
    finish until all its stages have summed gradients and stepped: path + tail, or the first
           forward and the finish of the stages behind it,
    load   of its most loaded device: ops, optimizer, and the frozen work that is to be hidden,
    total  of all devices: the same, for frozen work that may move between the devices of a group.
Each holds for every schedule that flushes and keeps one stage a device. path and finish are least
over cuts separately, so the bound of a chain may be below that of any cut: it stays a bound.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.stage_costs import Array, BackboneCosts, Cutting, StageTable


class ChainCosts(Protocol):
    """What is asked of the costs of a chain: a backbone's, or those of one direction of several."""

    @property
    def profile(self) -> Profile: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102

    def hops_us(self, cutting: Cutting, most_replicas: int) -> tuple[Array, Array]: ...  # noqa: D102
    def table(self, cutting: Cutting, *, replicas: int, from_back: int) -> StageTable: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Least times of the layers from each border on, in given numbers of stages and devices."""

    path: Array
    finish: Array
    load: Array
    total: Array

    def row(self, index: int) -> "Rest":
        """One of several rests in rows."""
        return Rest(
            path=self.path[index],
            finish=self.finish[index],
            load=self.load[index],
            total=self.total[index],
        )

    @classmethod
    def least(cls, rests: Sequence["Rest"]) -> "Rest":
        """The least of each time."""
        return cls(
            path=np.minimum.reduce([x.path for x in rests]),
            finish=np.minimum.reduce([x.finish for x in rests]),
            load=np.minimum.reduce([x.load for x in rests]),
            total=np.minimum.reduce([x.total for x in rests]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What the stages chosen so far do to the times of the stages behind them.

    finish = max(own, before_path + path', before_finish + finish'), load = max(load, load'),
    total = total + total'.
    """

    own: float
    before_path: float
    before_finish: float
    load: float
    total: float


NOTHING = Prefix(own=0.0, before_path=0.0, before_finish=0.0, load=0.0, total=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Per stage ``[start, stop)``: what the recursion adds up.

    `around` stands before and after the path of the stages behind, `first` before their finish.
    """

    work: Array
    around: Array
    first: Array
    tail: Array
    load: Array
    total: Array


def least_work_us(costs: BackboneCosts, cutting: Cutting) -> float:
    """Least mean over a group's devices of their ops and optimizers, however the chain is cut."""
    layers = [
        np.diagonal(costs.table(cutting, replicas=n, from_back=1, limited=False).total, 1)
        for n in range(1, min(cutting.num_devices, cutting.sizes[-1]) + 1)
    ]
    return float(np.minimum.reduce(layers).sum()) / cutting.num_devices


class ChainBounds:
    """Bounds of all chains for one cutting of the batch.

    `frozen_us` is each device's frozen work; if `hidden` it runs in bubbles and counts as load,
    else it comes first and shifts everything. If `shared` it may move between the devices of a
    group, and counts as a load of all of them together. `uniform`: one device a stage. Numbers of
    devices and of replicas are only added up and looked up, so that `mixed` can let them stand for
    more.
    """

    def __init__(
        self,
        costs: ChainCosts,
        cutting: Cutting,
        *,
        max_stages: int,
        frozen_us: int,
        hidden: bool,
        shared: bool = False,
        uniform: bool = False,
    ) -> None:
        self.costs, self.cutting = costs, cutting
        self.frozen_us, self.hidden, self.shared = frozen_us, hidden, shared and hidden
        self.max_stages = min(max_stages, costs.num_layers, cutting.num_devices)
        self.most_replicas = 1 if uniform else min(cutting.num_devices, cutting.sizes[-1])
        self._hops = costs.hops_us(cutting, self.most_replicas)
        self._tables: dict[tuple[int, int], tuple[StageTable, Terms]] = {}

    def table(self, replicas: int, from_back: int) -> StageTable:
        """Costs of stages `from_back` stages before the end of the pipeline."""
        return self._table_and_terms(replicas, from_back)[0]

    @property
    def all_devices(self) -> int:
        """Devices of a whole chain."""
        return self.cutting.num_devices

    def device_choices(self, num_stages: int) -> Sequence[int]:
        """Devices that the last `num_stages` stages may have together."""
        return range(num_stages, self.all_devices + 1)

    def behind(self, num_devices: int, replicas: int) -> int:
        """Devices left when a stage has taken its own."""
        return num_devices - replicas

    def replica_choices(self, num_stages: int, num_devices: int) -> Sequence[int]:
        """Devices the first of `num_stages` stages may have, the others keeping one at least."""
        most = min(num_devices - num_stages + 1, self.most_replicas)
        return range(num_devices if num_stages == 1 else 1, most + 1)

    def least_us(self, num_stages: int) -> float:
        """No cut into `num_stages` stages ends the iteration earlier (infinite: none fits)."""
        rest = self._rests.get((num_stages, self.all_devices))
        if rest is None:
            return float("inf")
        mean_us = float(self._mean_us(rest.total)[0])
        return self.close_us(max(float(rest.finish[0]), float(rest.load[0]), mean_us))

    def _mean_us(self, total: Array) -> Array:
        """Mean over a group's devices of all they do, from the total of their ops."""
        frozen_us = self.frozen_us if self.shared else 0
        return total / self.cutting.num_devices + frozen_us

    def close_us(self, end_us: float) -> float:
        """Add what is the same for every cut."""
        up_front_us = 0 if self.hidden else self.frozen_us
        return end_us + up_front_us + self.costs.profile.overhead_us

    def extend(
        self, prefix: Prefix, start: int, replicas: int, num_stages: int, num_devices: int
    ) -> Array:
        """Bounds after adding stage ``[start, stop)`` to a prefix, for every `stop`.

        Args:
            prefix: The stages before `start`.
            start: First layer of the new stage.
            replicas: Its devices.
            num_stages: Stages from `start` on, the new one included.
            num_devices: Devices of those stages.
        """
        t = self._table_and_terms(replicas, num_stages)[1]
        path, load = t.work[start], np.maximum(prefix.load, t.load[start])
        total = prefix.total + t.total[start]
        finish = path + t.tail[start]
        if num_stages > 1:
            behind = self._rests.get((num_stages - 1, self.behind(num_devices, replicas)))
            if behind is None:
                return np.full_like(path, np.inf)
            path = np.maximum(path, t.around[start] + behind.path)
            finish = np.maximum(path + t.tail[start], t.first[start] + behind.finish)
            load = np.maximum(load, behind.load)
            total = total + behind.total
        load = np.maximum(load, self._mean_us(total))
        ends = np.maximum(prefix.before_path + path, prefix.before_finish + finish)
        bounds: Array = np.maximum(np.maximum(ends, prefix.own), load)
        if num_stages == 1:
            bounds[:-1] = np.inf
        return bounds

    def advance(
        self, prefix: Prefix, start: int, stop: int, replicas: int, num_stages: int
    ) -> Prefix:
        """The prefix with stage ``[start, stop)`` added."""
        t = self._table_and_terms(replicas, num_stages)[1]
        work, tail = float(t.work[start, stop]), float(t.tail[start, stop])
        around, p = float(t.around[start, stop]), prefix
        return Prefix(
            own=max(p.own, p.before_path + work, p.before_finish + work + tail),
            before_path=max(p.before_path + around, p.before_finish + around + tail),
            before_finish=p.before_finish + float(t.first[start, stop]),
            load=max(p.load, float(t.load[start, stop])),
            total=p.total + float(t.total[start, stop]),
        )

    @cached_property
    def _rests(self) -> dict[tuple[int, int], Rest]:
        """Dynamic programming from the last stage to the first."""
        rests: dict[tuple[int, int], Rest] = {}
        for num_stages in range(1, self.max_stages + 1):
            found: dict[int, list[Rest]] = {}
            for replicas, choices in self._followers(num_stages, rests).items():
                all_behind = [behind for _, behind in choices if behind is not None]
                least = self._rest(replicas, num_stages, all_behind)
                for i, (num_devices, _) in enumerate(choices):
                    found.setdefault(num_devices, []).append(least.row(i))
            for num_devices, rows in found.items():
                rests[num_stages, num_devices] = Rest.least(rows)
        return rests

    def _followers(
        self, num_stages: int, rests: Mapping[tuple[int, int], Rest]
    ) -> dict[int, list[tuple[int, Rest | None]]]:
        """By devices of the first of `num_stages` stages: (devices of all, what comes behind)."""
        found: dict[int, list[tuple[int, Rest | None]]] = {}
        for num_devices in self.device_choices(num_stages):
            for replicas in self.replica_choices(num_stages, num_devices):
                behind = rests.get((num_stages - 1, self.behind(num_devices, replicas)))
                if num_stages == 1 or behind is not None:
                    found.setdefault(replicas, []).append((num_devices, behind))
        return found

    def _rest(self, replicas: int, num_stages: int, behind: Sequence[Rest]) -> Rest:
        """A row for each rest that may be behind; the one row of a last stage for none."""
        t = self._table_and_terms(replicas, num_stages)[1]
        if not behind:
            return Rest(
                path=t.work[None, :, -1],
                finish=(t.work + t.tail)[None, :, -1],
                load=t.load[None, :, -1],
                total=t.total[None, :, -1],
            )
        paths, finishes = _stacked(x.path for x in behind), _stacked(x.finish for x in behind)
        path = np.maximum(t.work, t.around + paths)
        finish = np.maximum(path + t.tail, t.first + finishes)
        load = np.maximum(t.load, _stacked(x.load for x in behind))
        return Rest(
            path=path.min(axis=-1),
            finish=finish.min(axis=-1),
            load=load.min(axis=-1),
            total=(t.total + _stacked(x.total for x in behind)).min(axis=-1),
        )

    def _table_and_terms(self, replicas: int, from_back: int) -> tuple[StageTable, Terms]:
        """Positions differ only in what they hold, and that only where memory is limited."""
        limited = self.cutting.memory_bytes is not None
        key = (replicas, self.cutting.in_flight(from_back) if limited else 0)
        if key not in self._tables:
            self._tables[key] = self._make_terms(replicas, from_back)
        return self._tables[key]

    def _make_terms(self, replicas: int, from_back: int) -> tuple[StageTable, Terms]:
        t = self.costs.table(self.cutting, replicas=replicas, from_back=from_back)
        hidden_us = self.frozen_us if self.hidden and not self.shared else 0
        return t, self._terms(t, t.work + t.step + hidden_us)

    def _terms(self, t: StageTable, load: Array) -> Terms:
        forward_hop, back_hop = self._hops
        first = t.first + forward_hop
        return Terms(
            work=t.work,
            around=first + back_hop + t.last,
            first=first,
            tail=t.sync + t.step,
            load=load,
            total=t.total,
        )


def _stacked(rests: Iterable[Array]) -> Array:
    """Times from each border on, one plane a rest: they are added to those of stages before it."""
    stacked: Array = np.stack(list(rests))[:, None, :]
    return stacked

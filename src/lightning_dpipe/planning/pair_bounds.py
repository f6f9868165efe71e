"""Lower bounds on the iteration of two directions of backbones on the same devices.

In:     the costs of both directions (`directions`) and how a group cuts its batch.
Out:    for every position that may come next, what no completion of the pipeline beats.

Positions are chosen from the first on: down stages from their first layers, up stages from their
last. Four bounds hold for every schedule that flushes:
    down   the chain of down stages, as if the up ones were not there (`bounds`),
    up     the same the other way round: its last stages are known, its first ones still to come,
    load   the most loaded position: ops of both stages, optimizer, hidden frozen work,
    joint  a device starts when the first micro-batch of either direction has reached it, works
           through both stages, and what comes last still has to travel back or to be reduced; and
           its two reductions run one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_dpipe.planning.bounds import NOTHING, ChainBounds, Prefix
from lightning_dpipe.planning.directions import Directions
from lightning_dpipe.planning.stage_costs import Array, Cutting, StageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one direction's stages add to a position, per stage ``[start, stop)``.

    Two stages on one position cost the sum of their `work`, but at least what either needs `alone`,
    and fit only if their `num_bytes` do.
    """

    work: Array
    num_bytes: Array
    alone: Array | None = None


Mask = NDArray[np.bool_]

Sides = Callable[[int], tuple[Side, Side]]
"""Replicas of a position -> down and up stages on so many devices."""


class Bottleneck:
    """Least cost of the most loaded position over all ways to spread what is left.

    Exact dynamic programming, one matrix (down layers taken, up layers left) per number of
    positions and devices, made when first asked for. Costs above `most` may come out as infinite;
    a position has `room` for the bytes of its stages.
    """

    def __init__(
        self, sides: Sides, *, most_replicas: int, most: float = np.inf, room: float = np.inf
    ) -> None:
        self.sides, self.most_replicas, self.most, self.room = sides, most_replicas, most, room
        self._found: dict[tuple[int, int], Array] = {}

    def at(self, num_positions: int, num_devices: int) -> Array:
        """``[a, b]``: cost of down layers ``a..`` and up layers ``..b`` on so many positions."""
        key = (num_positions, num_devices)
        if key not in self._found:
            self._found[key] = self._at(num_positions, num_devices)
        return self._found[key]

    def _at(self, num_positions: int, num_devices: int) -> Array:
        down, up = self.sides(1)
        least = np.full((len(down.work), len(up.work)), np.inf)
        if num_positions == 0:
            least[-1, 0] = 0.0 if num_devices == 0 else np.inf
            return least
        most = min(num_devices - num_positions + 1, self.most_replicas)
        first = num_devices if num_positions == 1 else 1
        for replicas in range(first, most + 1):
            behind = self.at(num_positions - 1, num_devices - replicas)
            self._add(least, *self.sides(replicas), behind)
        return least

    def _add(self, least: Array, down: Side, up: Side, behind: Array) -> None:
        """Take into `least` what it costs to put one position before `behind`."""
        reachable = np.flatnonzero(np.isfinite(behind).any(axis=0))
        if not len(reachable):
            return
        up_work = up.work[reachable]
        for a in range(len(least)):
            work = down.work[a]
            stops = np.flatnonzero((work <= self.most) & np.isfinite(behind).any(axis=1))
            if not len(stops):
                continue
            costs = work[stops][:, None, None] + up_work[None, :, :]
            np.maximum(costs, behind[np.ix_(stops, reachable)][:, :, None], out=costs)
            if down.alone is not None and up.alone is not None:
                np.maximum(costs, down.alone[a, stops][:, None, None], out=costs)
                np.maximum(costs, up.alone[reachable][None, :, :], out=costs)
            if np.isfinite(self.room):
                held = down.num_bytes[a, stops][:, None, None] + up.num_bytes[reachable][None, :, :]
                costs[held > self.room] = np.inf
            np.minimum(least[a], costs.min(axis=(0, 1)), out=least[a])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrefix:
    """What the positions `chosen` so far do to the times of those still to come.

    `down` is the chain of their down stages. `up_path` and `up_finish` run from the first forward
    of their up stages. The last backward leaves the down stages after `down_back`.
    """

    chosen: int
    down: Prefix
    up_path: float
    up_finish: float
    down_back: float
    load: float


NO_POSITION = PairPrefix(
    chosen=0, down=NOTHING, up_path=-np.inf, up_finish=-np.inf, down_back=0.0, load=0.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """Least sums over up stages that are still to come, by the layers they hold."""

    first: Array
    around: Array
    back: Array


class PairBounds:
    """Bounds of all pipelines in two directions, for one cutting of the batch.

    `frozen_us`, `hidden` and `shared` as in `bounds.ChainBounds`. Where memory is limited, a
    position must at least hold the weights of its stages and the activations of either.
    """

    def __init__(
        self,
        directions: Directions,
        cutting: Cutting,
        *,
        max_positions: int,
        frozen_us: int,
        hidden: bool,
        shared: bool = False,
    ) -> None:
        self.directions, self.cutting = directions, cutting
        self.frozen_us = frozen_us if hidden else 0
        self.hidden_us = 0 if shared else self.frozen_us
        free = replace(cutting, memory_bytes=None)
        self.down, self.up = (
            ChainBounds(
                d,
                free,
                max_stages=max_positions,
                frozen_us=frozen_us,
                hidden=hidden,
                shared=shared,
            )
            for d in (directions.down, directions.up)
        )
        self.most_replicas = self.down.most_replicas
        self._resident = (directions.down.resident_bytes(), directions.up.resident_bytes())
        self._hops = directions.up.hops_us(cutting, self.most_replicas)
        self._down_hops = directions.down.hops_us(cutting, self.most_replicas)
        self._befores: dict[tuple[int, int], _Before] = {}
        self._held: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        frozen_bytes = directions.down.costs[0].frozen_bytes
        self._room = np.inf if cutting.memory_bytes is None else cutting.memory_bytes - frozen_bytes
        self._rest = Bottleneck(self._sides, most_replicas=self.most_replicas, room=self._room)

    @property
    def shape(self) -> tuple[int, int]:
        """Borders of both directions."""
        return self.directions.down.num_layers + 1, self.directions.up.num_layers + 1

    def replica_choices(self, num_positions: int, num_devices: int) -> Sequence[int]:
        """Devices the first of `num_positions` positions may have."""
        return self.down.replica_choices(num_positions, num_devices)

    def least_us(self, num_positions: int) -> float:
        """No pipeline of `num_positions` positions ends the iteration earlier: found at once.

        Either direction alone, or all work spread evenly over all devices.
        """
        alone_us = max(self.down.least_us(num_positions), self.up.least_us(num_positions))
        spread_us = self._spread_us("work") + self.hidden_us
        return max(alone_us, self.down.close_us(max(spread_us, self.mean_us)))

    @cached_property
    def mean_us(self) -> float:
        """Least mean over a group's devices of all they do, frozen work included."""
        return self._spread_us("total") + self.frozen_us

    def _spread_us(self, name: str) -> float:
        """Ops of all layers over all devices, each layer at its best number of replicas."""
        total_us = 0.0
        for direction in (self.directions.down, self.directions.up):
            layers = [
                (replicas if name == "work" else 1)
                * np.diagonal(direction.ops_us(self.cutting, replicas, name), 1)
                for replicas in range(1, self.most_replicas + 1)
            ]
            total_us += float(np.minimum.reduce(layers).sum())
        return total_us / self.cutting.num_devices

    def rest_us(self, num_positions: int, num_devices: int) -> Array:
        """Least load of the most loaded position, see `Bottleneck.at`."""
        return self._rest.at(num_positions, num_devices)

    def extend(
        self, prefix: PairPrefix, a: int, b: int, replicas: int, num_positions: int, left: int
    ) -> Array:
        """Bounds after one more position, for every border it may reach in both directions.

        Args:
            prefix: The positions chosen before.
            a: Down layers they took.
            b: Up layers they left.
            replicas: Devices of the new position.
            num_positions: Positions from the new one on.
            left: Devices of those positions.
        """
        down, up = self._tables(replicas)
        before = self._before(num_positions - 1, left - replicas)
        forward, back = self._hops
        first_up = up.first[:, b] + forward[b]
        around_up = first_up + back[b] + up.last[:, b]
        up_path = np.maximum(up.work[:, b], around_up + prefix.up_path)
        tail_up = (up.sync + up.step)[:, b]
        up_finish = np.maximum(up_path + tail_up, first_up + prefix.up_finish)
        ends_up = np.maximum(before.around + up_path, before.first + up_finish)
        ends_down = self.down.extend(prefix.down, a, replicas, num_positions, left)
        step_us = down.step[a][:, None] + up.step[:, b][None, :]
        ops_us = down.work[a][:, None] + up.work[:, b][None, :]
        load = np.maximum(ops_us + step_us + self.hidden_us, prefix.load)
        load = np.maximum(load, self.rest_us(num_positions - 1, left - replicas))
        load = np.maximum(load, self.mean_us)
        starts = np.minimum(prefix.down.before_finish, before.first)[None, :]
        after_down = np.maximum(down.sync[a][:, None] + step_us, prefix.down_back)
        after_up = np.maximum(up.sync[:, b][None, :] + step_us, before.back[None, :])
        joint = starts + ops_us + np.minimum(after_down, after_up)
        reduced = np.minimum(
            prefix.down.before_finish + down.work[a][:, None],
            before.first[None, :] + up.work[:, b][None, :],
        ) + (down.sync[a][:, None] + up.sync[:, b][None, :] + step_us)
        bounds = np.maximum(np.maximum(ends_down[:, None], ends_up[None, :]), joint)
        bounds = np.maximum(bounds, reduced)
        bounds = self.down.close_us(0.0) + np.maximum(bounds, load)
        if self.cutting.memory_bytes is not None:
            bounds[~self._holds(prefix, a, b, replicas, num_positions)] = np.inf
        found: Array = bounds
        return found

    def advance(
        self,
        prefix: PairPrefix,
        down_stage: tuple[int, int],
        up_stage: tuple[int, int],
        replicas: int,
        num_positions: int,
    ) -> PairPrefix:
        """The prefix with one more position."""
        down, up = self._tables(replicas)
        forward, back = self._hops
        first_up = float(up.first[up_stage] + forward[up_stage[1]])
        around_up = first_up + float(back[up_stage[1]] + up.last[up_stage])
        path = max(float(up.work[up_stage]), around_up + prefix.up_path)
        tail_us = float(up.sync[up_stage] + up.step[up_stage])
        back_us = float(self._down_hops[1][down_stage[1]] + down.last[down_stage])
        load_us = float(
            down.work[down_stage] + up.work[up_stage] + down.step[down_stage] + up.step[up_stage]
        )
        return PairPrefix(
            chosen=prefix.chosen + 1,
            down=self.down.advance(prefix.down, *down_stage, replicas, num_positions),
            up_path=path,
            up_finish=max(path + tail_us, first_up + prefix.up_finish),
            down_back=prefix.down_back + back_us,
            load=max(prefix.load, load_us + self.hidden_us),
        )

    def _tables(self, replicas: int) -> tuple[StageTable, StageTable]:
        return self.down.table(replicas, 1), self.up.table(replicas, 1)

    def _sides(self, replicas: int) -> tuple[Side, Side]:
        """Ops, optimizer and half the frozen work each."""
        found = [
            Side(work=table.work + table.step + self.hidden_us / 2, num_bytes=resident)
            for table, resident in zip(self._tables(replicas), self._resident, strict=True)
        ]
        return found[0], found[1]

    def _before(self, num_stages: int, num_devices: int) -> _Before:
        """Up stages that are still to come."""
        key = (num_stages, num_devices)
        if key not in self._befores:
            self._befores[key] = self._sums(num_stages, num_devices)
        return self._befores[key]

    def _sums(self, num_stages: int, num_devices: int) -> _Before:
        nothing = np.full(self.shape[1], np.inf)
        if num_stages == 0:
            nothing[0] = 0.0 if num_devices == 0 else np.inf
            return _Before(first=nothing, around=nothing, back=nothing)
        first, around, back = nothing, nothing.copy(), nothing.copy()
        forward_hop, back_hop = self._hops
        for replicas in self.replica_choices(num_stages, num_devices):
            t = self._tables(replicas)[1]
            rest = self._before(num_stages - 1, num_devices - replicas)
            exists = np.where(np.isfinite(t.work), 0.0, np.inf)
            one_first = t.first + exists + forward_hop[None, :]
            one_back = t.last + exists + back_hop[None, :]
            one_around = one_first + one_back
            first = np.minimum(first, (rest.first[:, None] + one_first).min(axis=0))
            around = np.minimum(around, (rest.around[:, None] + one_around).min(axis=0))
            back = np.minimum(back, (rest.back[:, None] + one_back).min(axis=0))
        return _Before(first=first, around=around, back=back)

    def _holds(self, prefix: PairPrefix, a: int, b: int, replicas: int, left: int) -> Mask:
        """``[a', b']``: whether a device may hold the position; `left` positions from it on."""
        key = (replicas, left, prefix.chosen + 1)
        if key not in self._held:
            self._held[key] = (
                self.directions.down.held_bytes(self.cutting, replicas, left),
                self.directions.up.held_bytes(self.cutting, replicas, prefix.chosen + 1),
            )
        down, up = self._held[key]
        resident = self._resident[0][a][:, None] + self._resident[1][:, b][None, :]
        held = resident + np.maximum(down[a][:, None], up[:, b][None, :])
        return np.asarray(held <= self._room)

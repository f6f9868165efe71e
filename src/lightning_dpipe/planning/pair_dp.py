"""Partition of several backbones in two directions with DiffusionPipe's own objective.

In:     costs of both directions, the number of positions, the devices of one pipeline group.
Out:    the `PairCut` of least (M + 2S - 2) W + Y over all cuts of both directions and replications.
Source: DiffusionPipe (arXiv 2405.01248), section 4: the state holds the layers of both directions
        that live on the devices still to come. W is the slowest position: forward and backward of
        a micro-batch of both its stages, or the traffic of either, twice, as both directions share
        the links. Y is the largest reduction that no backward hides: that of a down stage hides
        behind the backwards of the down stages before it, that of an up stage behind those of the
        positions after it. Ours differs: W and Y are not separable, so each state keeps all tuples
        that no other one beats; a bottleneck table says which states lead to an end at all. Where
        memory asks for recomputation it is not priced.
"""

from dataclasses import dataclass, replace

import numpy as np

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.planning.directions import Direction, Directions
from lightning_dpipe.planning.pair_bounds import Bottleneck, Side
from lightning_dpipe.planning.pair_cuts import PairCut, Position
from lightning_dpipe.planning.stage_costs import Array, BackboneCosts, Cutting

_NEAR = 1 + 1e-9
_WIDER = (_NEAR, 1.05, 1.2, 1.5, 2.0, np.inf)
"""Limits on W relative to the least: the wider ones find a better T_max, which rules out more, and
cuts where memory rules out those of the least W. And room for rounding."""


@dataclass(frozen=True, slots=True)
class Line:
    """Positions up to some device: what they make of the objective.

    `gap_us` is the largest reduction that is left over, `up_gap_us` that of up stages, of which the
    positions to come still hide some. `hides_us` are the backwards of the down stages so far.
    """

    slowest_us: float
    slowest_sc_us: float
    gap_us: float
    up_gap_us: float
    hides_us: float
    positions: tuple[Position, ...]

    def beats(self, other: "Line") -> bool:
        """No worse in all five."""
        return (
            self.slowest_us <= other.slowest_us
            and self.slowest_sc_us <= other.slowest_sc_us
            and self.gap_us <= other.gap_us
            and self.up_gap_us <= other.up_gap_us
            and self.hides_us >= other.hides_us
        )


def paper_pair_partition(
    directions: Directions,
    cutting: Cutting,
    *,
    num_positions: int,
    probability: float = 0.0,
    uniform: bool = False,
    quick: bool = False,
) -> PairCut:
    """The cut whose T_max is least.

    Args:
        directions: Costs of both.
        cutting: How a group cuts its batch.
        num_positions: Stages of every backbone.
        probability: Share of self-conditioned steps; the objective is the expectation.
        uniform: One device for every position, as in the paper's evaluation.
        quick: Only the best of the cuts whose slowest position is about as fast as can be.

    Raises:
        PlanError: No cut has that many positions, devices and that little memory.
    """
    table = _Table(directions, cutting, probability, uniform)
    rest = table.rest.at(num_positions, cutting.num_devices)
    least_us = float(rest[0, directions.up.num_layers])
    factor = cutting.num_microbatches + 2 * num_positions - 2
    found = None
    for wider in _WIDER if np.isfinite(least_us) else ():
        # T_max >= factor * W: cuts near the least W give a T_max, no W above that / factor wins.
        if found is None or least_us * wider < found.bound_us / factor:
            most_us = np.inf if found is None else found.bound_us
            found = table.best(num_positions, factor, least_us * wider, most_us) or found
        if quick and found is not None:
            return found
    if found is None:
        raise PlanError(
            f"the backbones {', '.join(c.backbone for c in directions.backbones)} cannot be cut "
            f"into {num_positions} stages each on {cutting.num_devices} devices within their "
            "memory; choose another number"
        )
    limit_us = found.bound_us / factor * _NEAR
    return table.best(num_positions, factor, limit_us, found.bound_us) or found


class _Table:
    """Costs of positions by number of devices, and the walk over all states."""

    def __init__(
        self, directions: Directions, cutting: Cutting, probability: float, uniform: bool
    ) -> None:
        self.directions, self.cutting, self.probability = directions, cutting, probability
        self.most = 1 if uniform else min(cutting.num_devices, cutting.sizes[-1])
        self._costs: dict[int, tuple[_Costs, _Costs]] = {}
        self._side: dict[int, tuple[Side, Side]] = {}
        self._held: dict[tuple[int, int, int], tuple[Array, Array]] = {}
        memory, frozen_bytes = cutting.memory_bytes, directions.down.costs[0].frozen_bytes
        self.room = np.inf if memory is None else memory - frozen_bytes
        # At most this much backward is in the up layers before a border.
        rows = cutting.sizes[0]
        backward = directions.up.total(lambda c: c.at("backward_us", rows))
        self.hides_us: list[float] = backward[0].tolist()
        self.rest = Bottleneck(self._sides, most_replicas=self.most, room=self.room)

    def best(
        self, num_positions: int, factor: int, limit_us: float, most_us: float
    ) -> PairCut | None:
        """The best cut with positions within `limit_us` and T_max within `most_us`, if any."""
        num_up = self.directions.up.num_layers
        nothing = Line(0.0, 0.0, 0.0, 0.0, 0.0, ())
        fronts = {(self.cutting.num_devices, 0, num_up): [nothing]}
        for left in range(num_positions, 0, -1):
            place = (left, num_positions - left + 1)
            longer: dict[tuple[int, int, int], list[Line]] = {}
            for (devices, a, b), front in fronts.items():
                most = min(devices - left + 1, self.most)
                for replicas in range(devices if left == 1 else 1, most + 1):
                    reached = self._reached(a, b, replicas, place, devices, limit_us)
                    for stop, start, slowest_us in reached:
                        kept = longer.setdefault((devices - replicas, stop, start), [])
                        for line in front:
                            added = self._added(line, Position((a, stop), (start, b), replicas))
                            gap_us = max(added.gap_us, added.up_gap_us - self.hides_us[start])
                            slowest = max(added.slowest_us, slowest_us)
                            if factor * slowest + gap_us <= most_us * _NEAR:
                                _keep(kept, added)
            fronts = longer

        def t_max_us(line: Line) -> float:
            slowest_us = (
                1 - self.probability
            ) * line.slowest_us + self.probability * line.slowest_sc_us
            return factor * slowest_us + max(line.gap_us, line.up_gap_us)

        ends = [line for front in fronts.values() for line in front]
        if not ends:
            return None
        best = min(ends, key=lambda line: (t_max_us(line), _key(line)))
        return PairCut(positions=best.positions, bound_us=t_max_us(best))

    def _reached(
        self, a: int, b: int, replicas: int, place: tuple[int, int], devices: int, limit_us: float
    ) -> list[tuple[int, int, float]]:
        """Borders that a position may reach so that it and all others stay within the limit.

        And the slowest of them. `place` counts the positions from it on, and those up to it.
        """
        down, up = self._sides(replicas)
        costs = down.work[a][:, None] + up.work[:, b][None, :]
        assert down.alone is not None
        assert up.alone is not None
        costs = np.maximum(costs, np.maximum(down.alone[a][:, None], up.alone[:, b][None, :]))
        costs = np.maximum(costs, self.rest.at(place[0] - 1, devices - replicas))
        fits = (costs <= limit_us) & np.isfinite(costs)
        if np.isfinite(self.room):
            held = self._bytes(replicas, *place)
            fits &= held[0][a][:, None] + held[1][:, b][None, :] <= self.room
        return [(int(a), int(b), float(costs[a, b])) for a, b in np.argwhere(fits)]

    def _bytes(self, replicas: int, left: int, chosen: int) -> tuple[Array, Array]:
        """What down and up stages hold at their peaks, which are taken to coincide."""
        key = (replicas, left, chosen)
        if key not in self._held:
            down, up = self.directions.down, self.directions.up
            self._held[key] = (
                down.resident_bytes() + down.held_bytes(self.cutting, replicas, left),
                up.resident_bytes() + up.held_bytes(self.cutting, replicas, chosen),
            )
        return self._held[key]

    def _added(self, line: Line, position: Position) -> Line:
        down, up = self.costs(position.replicas)
        d, u = position.down, position.up
        traffic_us = max(float(down.traffic[d]), float(up.traffic[u]))
        traffic_sc_us = max(float(down.traffic_sc[d]), float(up.traffic_sc[u]))
        ops_us = float(down.ops[d] + up.ops[u])
        ops_sc_us = float(down.ops_sc[d] + up.ops_sc[u])
        left_over_us = float(down.sync[d]) - line.hides_us
        return Line(
            slowest_us=max(line.slowest_us, ops_us, traffic_us),
            # Without self-conditioned steps all are alike in this: it keeps none alive.
            slowest_sc_us=max(line.slowest_sc_us, ops_sc_us, traffic_sc_us)
            if self.probability
            else 0.0,
            gap_us=max(line.gap_us, left_over_us),
            up_gap_us=max(float(up.sync[u]), line.up_gap_us - float(up.backward[u])),
            hides_us=line.hides_us + float(down.backward[d]),
            positions=(*line.positions, position),
        )

    def costs(self, replicas: int) -> "tuple[_Costs, _Costs]":
        """Of down and up stages on so many devices."""
        if replicas not in self._costs:
            self._costs[replicas] = (
                _Costs.of(self.directions.down, self.cutting, replicas),
                _Costs.of(self.directions.up, self.cutting, replicas),
            )
        return self._costs[replicas]

    def _sides(self, replicas: int) -> tuple[Side, Side]:
        if replicas not in self._side:
            directions = (self.directions.down, self.directions.up)
            down, up = (
                Side(
                    work=np.where(direction.exists, costs.ops, np.inf),
                    num_bytes=direction.resident_bytes(),
                    alone=costs.traffic,
                )
                for costs, direction in zip(self.costs(replicas), directions, strict=True)
            )
            self._side[replicas] = (down, up)
        return self._side[replicas]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Per stage of a direction: ops and traffic of a micro-batch, reduction, and backward.

    `ops_sc` and `traffic_sc` are those of a self-conditioned step.
    """

    ops: Array
    ops_sc: Array
    traffic: Array
    traffic_sc: Array
    sync: Array
    backward: Array

    @classmethod
    def of(cls, direction: Direction, cutting: Cutting, replicas: int) -> "_Costs":
        rows = -(-cutting.sizes[0] // replicas)
        conditioned = replace(cutting, self_conditioned=True)
        link = direction.profile.p2p

        def forward(costs: BackboneCosts) -> Array:
            return costs.at("forward_us", rows)

        def again(costs: BackboneCosts) -> Array:
            return forward(costs) * direction.of(costs, conditioned).self_conditioned

        ops = direction.total(lambda c: forward(c) + c.at("backward_us", rows))
        num_bytes = direction.incoming_bytes() * rows
        feeds_back = any(direction.of(c, conditioned).self_conditioned for c in direction.costs)
        wire, sent = num_bytes * 1e6 / link.bytes_per_s, num_bytes > 0
        return cls(
            ops=ops,
            ops_sc=ops + direction.total(again),
            traffic=2 * np.where(sent, wire + 2 * link.latency_us, 0),
            traffic_sc=2 * np.where(sent, 1.5 * wire + 3 * link.latency_us, 0)
            if feeds_back
            else 2 * np.where(sent, wire + 2 * link.latency_us, 0),
            sync=direction.total(lambda c: c.sync(replicas * cutting.num_groups)),
            backward=direction.total(lambda c: c.at("backward_us", rows)),
        )


def _keep(front: list[Line], line: Line) -> None:
    """Add a line unless another is as good; drop those it makes useless."""
    if any(other.beats(line) for other in front):
        return
    front[:] = [other for other in front if not line.beats(other)]
    front.append(line)


def _key(line: Line) -> list[tuple[int, int, int]]:
    return [(p.down[1], p.up[0], p.replicas) for p in line.positions]

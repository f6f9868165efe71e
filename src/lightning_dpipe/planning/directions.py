"""The two directions in which several backbones are piped over the same devices.

In:     a Profile with two or more backbones.
Out:    `Direction`s: chains of borders at which all backbones of a direction are cut together, and
        what every stage between two borders costs.
Source: DiffusionPipe (arXiv 2405.01248), section 4: one backbone is piped down, the other up; with
        more than two the stages of a direction that sit on the same devices count as one.

Backbones alternate in the order of the graph: down, up, down. A position is a place in the pipeline
with one or more devices; it holds one stage of every backbone. A direction with one backbone can be
cut at each of its layers. With several, a border stands at each share of work at which one of them
can be cut, and cuts the others where they are nearest to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.partition import incoming_bytes
from lightning_dpipe.planning.stage_costs import Array, BackboneCosts, Cutting, StageTable


class Direction:
    """Backbones piped the same way. ``borders[i, k]`` are the layers of backbone k before border i.

    Has what `bounds.ChainBounds` asks of a backbone's costs, a border being a layer there.
    """

    def __init__(self, costs: Sequence[BackboneCosts]) -> None:
        self.costs = tuple(costs)
        self.profile: Profile = costs[0].profile
        self.borders = _borders(self.costs)
        self.num_layers = len(self.borders) - 1
        steps = self.borders[None, :, :] - self.borders[:, None, :]
        self.exists: NDArray[np.bool_] = np.asarray((steps > 0).all(axis=2))
        """``[start, stop]``: whether every backbone has a layer between the two borders."""
        self.step = self.total(lambda c: c.step)

    def total(self, of: Callable[[BackboneCosts], Array]) -> Array:
        """Sum over the backbones of a matrix over their layers, between borders."""
        sums = np.zeros_like(self.exists, dtype=np.float64)
        for k, costs in enumerate(self.costs):
            sums += self._pick(k, of(costs))
        return sums

    def table(self, cutting: Cutting, *, replicas: int, from_back: int = 1) -> StageTable:
        """All stages between two borders on `replicas` devices; memory is not looked at.

        A stage of several backbones works as long as all of them together. Its first op, its last
        one and the reduction after it are the shortest of all: any backbone's may be that one.
        """
        tables = [
            c.table(self.of(c, cutting), replicas=replicas, from_back=from_back, limited=False)
            for c in self.costs
        ]

        def least(name: str) -> Array:
            picked = [self._pick(k, getattr(t, name)) for k, t in enumerate(tables)]
            found: Array = np.minimum.reduce(picked)
            return found

        return StageTable(
            work=np.where(self.exists, self.ops_us(cutting, replicas, "work"), np.inf),
            total=np.where(self.exists, self.ops_us(cutting, replicas, "total"), np.inf),
            first=least("first"),
            last=least("last"),
            sync=least("sync"),
            step=self.step,
            recompute=np.zeros_like(self.exists),
        )

    def ops_us(self, cutting: Cutting, replicas: int, name: str) -> Array:
        """`work` or `total` of a StageTable; also where some backbone has no layer."""

        def ops(costs: BackboneCosts) -> Array:
            own = self.of(costs, cutting)
            table = costs.table(own, replicas=replicas, from_back=1, limited=False)
            return np.where(costs.sequential, getattr(table, name), 0.0)

        return self.total(ops)

    def hops_us(self, cutting: Cutting, most_replicas: int) -> tuple[Array, Array]:
        """Per border: least time of the first message forward and of the last one back."""
        hops = [c.hops_us(cutting, most_replicas) for c in self.costs]
        forward, back = (
            np.minimum.reduce([hop[i][self.borders[:, k]] for k, hop in enumerate(hops)])
            for i in range(2)
        )
        return forward, back

    def resident_bytes(self) -> Array:
        """Weights, gradients and moments of every stage."""
        return self.total(lambda c: c.resident_bytes)

    def held_bytes(self, cutting: Cutting, replicas: int, from_back: int) -> Array:
        """Most activations that any backbone of a stage holds, recomputed where that is less."""
        held = [
            self._pick(k, np.minimum(*c.held_bytes(cutting, replicas, from_back)))
            for k, c in enumerate(self.costs)
        ]
        found: Array = np.maximum.reduce(held)
        return found

    def incoming_bytes(self) -> Array:
        """Bytes per sample that cross into every stage, and back."""
        graph = self.profile.graph

        def square(costs: BackboneCosts) -> Array:
            table = incoming_bytes(graph, costs.backbone)
            return np.array([*table, [0] * (costs.num_layers + 1)], float)

        return self.total(square)

    def layers(self, start: int, stop: int) -> list[tuple[str, int, int]]:
        """(backbone, first layer, last layer + 1) of a stage."""
        return [
            (c.backbone, int(self.borders[start, k]), int(self.borders[stop, k]))
            for k, c in enumerate(self.costs)
        ]

    def of(self, costs: BackboneCosts, cutting: Cutting) -> Cutting:
        """The cutting as a backbone sees it: only the one that feeds back runs S ops."""
        feedback = self.profile.graph.feedback
        feeds_back = feedback is not None and feedback.backbone == costs.backbone
        return replace(cutting, self_conditioned=cutting.self_conditioned and feeds_back)

    def _pick(self, k: int, spans: Array) -> Array:
        at = self.borders[:, k]
        return spans[np.ix_(at, at)]


@dataclass(frozen=True)
class Directions:
    """Both directions of a model with several backbones."""

    down: Direction
    up: Direction

    @property
    def profile(self) -> Profile:
        """What the costs come from."""
        return self.down.profile

    @property
    def backbones(self) -> tuple[BackboneCosts, ...]:
        """Costs of all backbones, in the order of the graph."""
        names = [c.name for c in self.profile.graph.backbones]
        costs = {c.backbone: c for c in (*self.down.costs, *self.up.costs)}
        return tuple(costs[name] for name in names)

    @property
    def num_layers(self) -> int:
        """Layers of the shortest backbone: the most positions all of them can be cut into."""
        return min(c.num_layers for c in self.backbones)


def costs_of(profile: Profile) -> BackboneCosts | Directions:
    """Costs of the one backbone, or of the two directions of several.

    Raises:
        UnsupportedError: A backbone reads what another one writes.
    """
    names = [c.name for c in profile.graph.backbones]
    if len(names) == 1:
        return BackboneCosts(profile, names[0])
    _independent(profile)
    costs = [BackboneCosts(profile, name) for name in names]
    return Directions(down=Direction(costs[0::2]), up=Direction(costs[1::2]))


def backbones_of(
    costs: BackboneCosts | Directions,
) -> list[tuple[BackboneCosts, Callable[[Cutting], Cutting]]]:
    """Each backbone's costs, and how it sees a cutting."""
    if isinstance(costs, Directions):
        return [(c, partial(costs.down.of, c)) for c in costs.backbones]
    return [(costs, lambda cutting: cutting)]


def _independent(profile: Profile) -> None:
    """Two directions need backbones that do not wait for each other."""
    graph = profile.graph
    for component in graph.backbones:
        reads = {v for layer in component.layers for v in layer.reads}
        reads |= {v for loss in graph.losses if loss.backbone == component.name for v in loss.reads}
        for v in sorted(reads & graph.graph_state):
            writer = graph.writers[v][0]
            if writer != component.name:
                raise UnsupportedError(
                    f"backbone {component.name!r} reads {graph.values[v].name!r}, which backbone "
                    f"{writer!r} writes; backbones are piped in opposite directions and cannot "
                    "feed each other: make them one backbone"
                )


def _borders(costs: Sequence[BackboneCosts]) -> NDArray[np.int64]:
    """Layers of each backbone before each border, ascending, no two borders alike."""
    done = [_shares(c) for c in costs]
    if len(costs) == 1:
        return np.arange(costs[0].num_layers + 1)[:, None]
    rows = [
        tuple(int(np.abs(shares - share).argmin()) for shares in done)
        for share in np.unique(np.concatenate(done))
    ]
    # Both ends are borders: nothing of any backbone, and all of each.
    rows = [(0,) * len(costs), *rows, tuple(c.num_layers for c in costs)]
    return np.array([rows[0], *(b for a, b in pairwise(rows) if a != b)])


def _shares(costs: BackboneCosts) -> Array:
    """Share of a backbone's work before each of its layers."""
    samples = costs.cost.samples[-1]
    done = costs.at("forward_us", samples)[0] + costs.at("backward_us", samples)[0]
    shares: Array = done / max(1.0, float(done[-1]))
    return shares

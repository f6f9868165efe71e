"""The frozen work that one device still has to do, and how much of it goes into a bubble.

In:     the frozen components' layers with their costs, and the length of a bubble.
Out:    pieces (layer, samples) in an order that respects layer chains and the component DAG.

Each layer is done for a prefix of the device's samples, and never further than the layers whose
output it reads. Splitting a layer's batch costs extra when small batches are inefficient, so a
bubble takes what finishes a layer first, largest first, and partial batches only for the rest.
Source: DiffusionPipe (arXiv 2405.01248), section 5. Ours differs: any number of partial batches a
bubble, of any size, and a piece counts by how much work it takes off the end, not by its own time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill
from lightning_dpipe.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLayer:
    """Layer `index` of a frozen component; `before` are positions in run order it waits for."""

    component: str
    index: int
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The layer at position `layer` of the run order, on local samples ``[first, last)``."""

    layer: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class FrozenCosts:
    """All frozen layers in run order and what they cost: the same for every device.

    `samples` is the local batch; `overhead_us` is what starting one more fill costs the host.
    """

    profile: Profile
    samples: int
    overhead_us: int
    layers: tuple[FrozenLayer, ...]
    _costs: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, profile: Profile, *, samples: int, overhead_us: int) -> "FrozenCosts":
        """Collect the frozen layers of a profile's model."""
        return cls(
            profile=profile,
            samples=samples,
            overhead_us=overhead_us,
            layers=frozen_layers(profile.graph),
        )

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per layer: the layers that wait for it."""
        found: list[list[int]] = [[] for _ in self.layers]
        for i, layer in enumerate(self.layers):
            for p in layer.before:
                found[p].append(i)
        return tuple(map(tuple, found))

    def cost_us(self, layer: int, samples: int) -> int:
        """Time of one layer on some samples."""
        key = (layer, samples)
        if key not in self._costs:
            x = self.layers[layer]
            self._costs[key] = self.profile.forward_us(x.component, x.index, x.index + 1, samples)
        return self._costs[key]

    def prolongs(self, piece: Piece, last: Piece) -> bool:
        """Whether the two pieces make one fill: next layer, same component, same samples."""
        layers = self.layers
        return (
            piece.layer == last.layer + 1
            and layers[piece.layer].component == layers[last.layer].component
            and (piece.first, piece.last) == (last.first, last.last)
        )

    def fills(self, pieces: Sequence[Piece], device: int, after: Op | None) -> list[Fill]:
        """The pieces as fills that follow one op; those that prolong each other are joined."""
        fills: list[Fill] = []
        last: Piece | None = None
        for piece in pieces:
            layer = self.layers[piece.layer]
            if last is not None and self.prolongs(piece, last):
                fills[-1] = replace(fills[-1], stop=layer.index + 1)
            else:
                fills.append(
                    Fill(
                        device=device,
                        after=after,
                        component=layer.component,
                        start=layer.index,
                        stop=layer.index + 1,
                        first=piece.first,
                        last=piece.last,
                    )
                )
            last = piece
        return fills

    def most_samples(self, layer: int, samples: int, budget_us: int) -> int:
        """Up to `samples`: how many fit into the budget, taking cost to grow with samples."""
        low, high = 0, samples
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost_us(layer, middle) <= budget_us:
                low = middle
            else:
                high = middle - 1
        return low


def frozen_layers(graph: ModelGraph) -> tuple[FrozenLayer, ...]:
    """All frozen layers in run order, each with the earlier ones it waits for."""
    position = {
        (component.name, i): n
        for n, (component, i) in enumerate(
            (c, i) for c in graph.frozen for i in range(len(c.layers))
        )
    }
    found = []
    for component in graph.frozen:
        for i, layer in enumerate(component.layers):
            before = {position[graph.writers[v]] for v in layer.reads if v in graph.writers}
            if i:
                before.add(position[component.name, i - 1])
            found.append(
                FrozenLayer(component=component.name, index=i, before=tuple(sorted(before)))
            )
    return tuple(found)


class Backlog:
    """One device's state: `done[i]` samples of the layer at position i are encoded."""

    def __init__(
        self, work: FrozenCosts, *, partial: bool = True, order: Sequence[int] | None = None
    ) -> None:
        self.work, self.partial, self.order = work, partial, order
        self.done = [0] * len(work.layers)
        # How far each layer may go: as far as the layers whose output it reads.
        self._stops = [0 if layer.before else work.samples for layer in work.layers]
        self._ready = [i for i, stop in enumerate(self._stops) if stop]
        self._too_short_us = 0

    def pack(self, budget_us: int) -> tuple[list[Piece], int]:
        """Take pieces that fit into `budget_us` together, fill overheads included.

        Returns:
            The pieces in run order, and their time without the overheads.
        """
        pieces: list[Piece] = []
        used_us, left_us = 0, budget_us
        while left_us > self._too_short_us and self._ready:
            piece = self._choose(left_us, pieces[-1] if pieces else None)
            if piece is None:
                self._too_short_us = left_us
                break
            cost_us = self.work.cost_us(piece.layer, piece.last - piece.first)
            left_us -= cost_us + self._overhead_us(piece, pieces[-1] if pieces else None)
            used_us += cost_us
            self._take(piece)
            pieces.append(piece)
        return pieces, used_us

    def drain(self) -> tuple[list[Piece], int]:
        """Take everything that is left, each layer in one piece."""
        b = self.work.samples
        pieces = [Piece(i, done, b) for i, done in enumerate(self.done) if done < b]
        for piece in pieces:
            self._take(piece)
        return pieces, sum(self.work.cost_us(p.layer, p.last - p.first) for p in pieces)

    def _choose(self, budget_us: int, last: Piece | None) -> Piece | None:
        """The longest piece that finishes a layer; else the part that saves most; else None.

        With an order: the first such piece and the first such part instead.
        """
        work, b = self.work, self.work.samples
        best: tuple[bool, int, Piece] | None = None
        for i in self._ready:
            first, stop = self.done[i], self._stops[i]
            piece = Piece(i, first, stop)
            room_us = budget_us - self._overhead_us(piece, last)
            finishes = stop == b and work.cost_us(i, b - first) <= room_us
            if not finishes:
                if not self.partial:
                    continue
                num = work.most_samples(i, stop - first, room_us)
                piece = Piece(i, first, first + num)
            saved_us = work.cost_us(i, b - first) - work.cost_us(i, b - piece.last)
            worth_it = finishes or (piece.last > first and saved_us > work.overhead_us)
            rank = (finishes, saved_us if self.order is None else -self.order[i])
            if worth_it and (best is None or rank > best[:2]):
                best = (*rank, piece)
        return None if best is None else best[2]

    def _overhead_us(self, piece: Piece, last: Piece | None) -> int:
        """A piece that prolongs the fill before it by one layer is no new fill."""
        return 0 if last is not None and self.work.prolongs(piece, last) else self.work.overhead_us

    def _take(self, piece: Piece) -> None:
        self._too_short_us = 0
        self.done[piece.layer] = piece.last
        for i in self.work.readers[piece.layer]:
            self._stops[i] = min(self.done[p] for p in self.work.layers[i].before)
        near = {*self._ready, *self.work.readers[piece.layer]}
        self._ready = sorted(i for i in near if self._stops[i] > self.done[i])

"""The frozen work that a device still has to do on some samples, and what goes into a bubble.

In:     the frozen components' layers with their costs, and the length of a bubble.
Out:    pieces (layer, samples) in an order that respects layer chains and the component DAG.

Each layer is done for a prefix of the samples, and never further than the layers whose
output it reads. Splitting a layer's batch costs extra when small batches are inefficient, so a
bubble takes what finishes a layer first, largest first, and partial batches only for the rest.
Source: DiffusionPipe (arXiv 2405.01248), section 5. Ours differs: any number of partial batches a
bubble, of any size, and a piece counts by how much work it takes off the end, not by its own time.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill
from lightning_dpipe.core.profile import Profile, interpolate


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLayer:
    """Layer `index` of a frozen component; `before` are positions in run order it waits for."""

    component: str
    index: int
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The layer at position `layer` of the run order, on local samples ``[first, last)``.

    They are those of device `owner`, None: of the device that does the work.
    """

    layer: int
    first: int
    last: int
    owner: int | None = None


@dataclass(frozen=True, kw_only=True)
class FrozenCosts:
    """All frozen layers in run order and what they cost: the same for every device.

    `samples` is the local batch.
    """

    profile: Profile
    samples: int
    layers: tuple[FrozenLayer, ...]

    @classmethod
    def of(cls, profile: Profile, *, samples: int) -> "FrozenCosts":
        """Collect the frozen layers of a profile's model."""
        return cls(profile=profile, samples=samples, layers=frozen_layers(profile.graph))

    @property
    def fill_us(self) -> int:
        """What starting one more fill costs."""
        return self.profile.fill_us

    def chain_us(self, samples: int) -> int:
        """Everything frozen on some samples, each component in one fill."""
        if not samples:
            return 0
        starts_us = len(self.profile.graph.frozen) * self.fill_us
        return starts_us + sum(self.cost_us(i, samples) for i in range(len(self.layers)))

    @cached_property
    def times_us(self) -> tuple[tuple[int, ...], ...]:
        """Per layer: its time on 0, 1, ... samples, up to the local batch."""
        found = []
        for layer in self.layers:
            cost = self.profile.component(layer.component)
            times_us = cost.layers[layer.index].forward_us
            found.append(_up_to(self.samples, cost.samples, times_us))
        return tuple(found)

    @cached_property
    def least_us(self) -> int:
        """Least time of one local batch: each layer at the batch size with the best rate, and a
        fill for each component."""
        b, total_us = self.samples, len(self.profile.graph.frozen) * self.fill_us
        for times_us in self.times_us:
            total_us += min(-(-us * b // n) for n, us in enumerate(times_us) if n)
        return total_us

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
        if samples <= self.samples:
            return self.times_us[layer][samples]
        x = self.layers[layer]
        return self.profile.forward_us(x.component, x.index, x.index + 1, samples)

    def prolongs(self, piece: Piece, last: Piece) -> bool:
        """Whether the two pieces make one fill: next layer, same component, same samples."""
        layers = self.layers
        return (
            piece.layer == last.layer + 1
            and layers[piece.layer].component == layers[last.layer].component
            and (piece.first, piece.last, piece.owner) == (last.first, last.last, last.owner)
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
                        owner=piece.owner,
                    )
                )
            last = piece
        return fills

    def most_samples(self, layer: int, samples: int, budget_us: int) -> int:
        """Up to `samples`: how many fit into the budget, taking cost to grow with samples."""
        return bisect_right(self.times_us[layer], budget_us, 1, samples + 1) - 1


@lru_cache(maxsize=4096)
def _up_to(most: int, samples: tuple[int, ...], times_us: tuple[int, ...]) -> tuple[int, ...]:
    """A layer's profiled times at every number of samples; a search asks for them very often."""
    return tuple(interpolate(samples, times_us, n) for n in range(most + 1))


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
    """What is left of some samples: those below `done[i]` have passed the layer at position i.

    By default it is a device's whole local batch; else samples `rows` of the device `owner`.
    """

    def __init__(
        self,
        work: FrozenCosts,
        *,
        partial: bool = True,
        order: Sequence[int] | None = None,
        rows: tuple[int, int] | None = None,
        owner: int | None = None,
    ) -> None:
        self.work, self.partial, self.order, self.owner = work, partial, order, owner
        self.first, self.last = (0, work.samples) if rows is None else rows
        self.done = [self.first] * len(work.layers)
        # How far each layer may go: as far as the layers whose output it reads.
        self._stops = [self.first if layer.before else self.last for layer in work.layers]
        self._ready = [i for i, stop in enumerate(self._stops) if stop > self.first]
        self._too_short_us = 0

    def pack(self, budget_us: int) -> tuple[list[Piece], int]:
        """Take pieces that fit into `budget_us` together.

        Returns:
            The pieces in run order, and their time with what starting their fills costs.
        """
        pieces: list[Piece] = []
        left_us = budget_us
        while left_us > self._too_short_us and self._ready:
            piece = self._choose(left_us, pieces[-1] if pieces else None)
            if piece is None:
                self._too_short_us = left_us
                break
            left_us -= self._time_us(piece, pieces[-1] if pieces else None)
            self._take(piece)
            pieces.append(piece)
        return pieces, budget_us - left_us

    def drain(self) -> tuple[list[Piece], int]:
        """Take everything that is left, each layer in one piece."""
        pieces = [
            Piece(i, done, self.last, self.owner)
            for i, done in enumerate(self.done)
            if done < self.last
        ]
        spent_us = 0
        for last, piece in zip([None, *pieces], pieces, strict=False):
            spent_us += self._time_us(piece, last)
            self._take(piece)
        return pieces, spent_us

    def _choose(self, budget_us: int, last: Piece | None) -> Piece | None:
        """The longest piece that finishes a layer; else the part that saves most; else None.

        With an order: the first such piece and the first such part instead.
        """
        work, b = self.work, self.last
        best: tuple[bool, int, Piece] | None = None
        for i in self._ready:
            first, stop, times_us = self.done[i], self._stops[i], work.times_us[i]
            piece = Piece(i, first, stop, self.owner)
            room_us = budget_us - self._start_us(piece, last)
            finishes = stop == b and times_us[b - first] <= room_us
            if not finishes:
                if not self.partial:
                    continue
                num = work.most_samples(i, stop - first, room_us)
                piece = Piece(i, first, first + num, self.owner)
            saved_us = times_us[b - first] - times_us[b - piece.last]
            worth_it = finishes or (piece.last > first and saved_us > work.fill_us)
            rank = (finishes, saved_us if self.order is None else -self.order[i])
            if worth_it and (best is None or rank > best[:2]):
                best = (*rank, piece)
        return None if best is None else best[2]

    def _time_us(self, piece: Piece, last: Piece | None) -> int:
        return self._start_us(piece, last) + self.work.cost_us(
            piece.layer, piece.last - piece.first
        )

    def _start_us(self, piece: Piece, last: Piece | None) -> int:
        """A piece that prolongs the fill before it by one layer is no new fill."""
        return 0 if last is not None and self.work.prolongs(piece, last) else self.work.fill_us

    def _take(self, piece: Piece) -> None:
        self._too_short_us = 0
        self.done[piece.layer] = piece.last
        for i in self.work.readers[piece.layer]:
            self._stops[i] = min(self.done[p] for p in self.work.layers[i].before)
        near = {*self._ready, *self.work.readers[piece.layer]}
        self._ready = sorted(i for i in near if self._stops[i] > self.done[i])

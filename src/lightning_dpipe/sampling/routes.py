"""Which values cross between stages, and the messages that carry them.

In:     a row model, the stages' layer ranges, the units.
Out:    routes (a value goes from the stage that wrote it straight to each stage that reads it) and
        the messages of every channel in the order in which they are sent.
Shapes follow from the unit, so nothing is negotiated at run time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_dpipe.core.graph import DTYPE_BYTES
from lightning_dpipe.core.program import Channel, Lane, Message
from lightning_dpipe.sampling.parts import Along, RowModel, Scope, View
from lightning_dpipe.sampling.units import Op, Unit

Key = tuple[int, int, str]
"""Unit, reading stage and name of a value on its way."""


@dataclass(frozen=True, slots=True)
class Route:
    """A value that `target` reads and `source` wrote."""

    name: str
    scope: Scope
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value of a unit on its way to another rank."""

    key: Key
    message: Message


def find_routes(model: RowModel, stages: Sequence[tuple[int, int]]) -> tuple[Route, ...]:
    """All routes, by source stage, scope and name; the solver's own way back is not among them."""
    writer: dict[str, int] = {}
    routes: dict[Route, None] = {}
    for stage, (first, last) in enumerate(stages):
        for layer in model.layers[first:last]:
            for scope in Scope:
                part = layer.parts.get(scope)
                if part is None:
                    continue
                for name in part.reads:
                    source = writer.get(name, stage)
                    if source != stage:
                        route = Route(name, model.values[name].scope, source, stage)
                        routes.setdefault(route)
                writer |= dict.fromkeys(part.writes, stage)
    order = list(Scope)
    return tuple(sorted(routes, key=lambda r: (r.source, order.index(r.scope), r.target, r.name)))


def carries(model: RowModel, route: Route, unit: Unit) -> bool:
    """Whether a unit brings a route's value along."""
    if route.scope is Scope.CALL:
        return unit.opens_call
    if route.scope is Scope.STEP or model.values[route.name].along is Along.TEXT:
        return unit.opens_step
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All messages of a run.

    Attributes:
        model: What is sampled.
        routes: From `find_routes`.
        owners: Rank of every stage.
        following: From `units.successors`.
        views: By patch (None: whole image).
        batches: By group: images, and model inputs (twice the images with guidance).
        sample: Channels and width of the latent.
        sample_dtype: Of the latent.
        dtype: Of the model's values.
    """

    model: RowModel
    routes: tuple[Route, ...]
    owners: tuple[int, ...]
    following: Mapping[int, tuple[Unit, ...]]
    views: Mapping[int | None, View]
    batches: tuple[tuple[int, int], ...]
    sample: tuple[int, int]
    sample_dtype: str
    dtype: str

    def channels(self, owners: Sequence[int] | None = None) -> tuple[Channel, ...]:
        """Every directed edge between ranks, in an order all ranks derive.

        `owners` are the ranks of another pipeline with the same stages; None: of this one.
        """
        at = self.owners if owners is None else owners
        edges = [(at[r.source], at[r.target]) for r in self.routes]
        edges.append((at[-1], at[0]))
        return tuple(
            Channel(source=a, target=b, lane=Lane.PIPELINE)
            for a, b in dict.fromkeys(edges)
            if a != b
        )

    def out_of(self, op: Op) -> Iterator[tuple[Key, Message | None]]:
        """What an op hands on, in order; no message: the reader is on the same rank."""
        unit = op.unit
        for route in self.routes:
            if route.source == op.stage and carries(self.model, route, unit):
                value = self.model.values[route.name]
                shape = value.shape(self.batches[unit.group][1], self.view(unit))
                yield self._parcel(unit, route.source, route.target, route.name, shape, self.dtype)
        if op.stage == len(self.owners) - 1:
            for later in self.following[unit.index]:
                yield from self.to_first(later)

    def sent_bytes(
        self, orders: Mapping[int, Sequence[Op]], opening: Sequence[Unit]
    ) -> dict[Channel, int]:
        """What every channel carries in a whole call, the comparison of digests apart."""
        found = dict.fromkeys(self.channels(), 0)
        parcels = [self.to_first(unit) for unit in opening]
        parcels += [self.out_of(op) for ops in orders.values() for op in ops]
        for _, message in chain.from_iterable(parcels):
            if message is not None:
                found[message.channel] += math.prod(message.shape) * DTYPE_BYTES[message.dtype]
        return found

    def to_first(self, unit: Unit) -> Iterator[tuple[Key, Message | None]]:
        """What the solver hands to the first stage: a unit's latent rows, and the estimate's."""
        view = self.view(unit)
        height = (view.last - view.first) * self.model.patch
        shape = (self.batches[unit.group][0], self.sample[0], height, self.sample[1])
        for name in self.fed_back():
            yield self._parcel(unit, len(self.owners) - 1, 0, name, shape, self.sample_dtype)

    def fed_back(self) -> tuple[str, ...]:
        """Names of what the solver hands to the first stage."""
        model = self.model
        return (model.noisy,) if model.estimate is None else (model.noisy, model.estimate)

    def view(self, unit: Unit) -> View:
        """The rows of a unit."""
        return self.views[unit.patch]

    def _parcel(
        self, unit: Unit, source: int, target: int, name: str, shape: tuple[int, ...], dtype: str
    ) -> tuple[Key, Message | None]:
        key = (unit.index, target, name)
        ends = (self.owners[source], self.owners[target])
        if ends[0] == ends[1]:
            return key, None
        channel = Channel(source=ends[0], target=ends[1], lane=Lane.PIPELINE)
        tag = f"{name} of {unit} for stage {target}"
        return key, Message(channel=channel, tag=tag, shape=shape, dtype=dtype)

    def into(
        self, rank: int, orders: Mapping[int, Sequence[Op]], opening: Sequence[Unit]
    ) -> dict[Channel, tuple[Parcel, ...]]:
        """All that `rank` receives, by channel and in the order in which it is sent.

        `opening` are the first step's units: their latents are sent before any op.
        """
        found: dict[Channel, list[Parcel]] = {}

        def note(parcels: Iterator[tuple[Key, Message | None]]) -> None:
            for key, message in parcels:
                if message is not None and message.channel.target == rank:
                    found.setdefault(message.channel, []).append(Parcel(key, message))

        if self.owners[0] == rank:
            for unit in opening:
                note(self.to_first(unit))
        for sender, ops in orders.items():
            if sender != rank:
                for op in ops:
                    note(self.out_of(op))
        return {channel: tuple(parcels) for channel, parcels in found.items()}

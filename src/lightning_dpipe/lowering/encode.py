"""Frozen work of a step: the prologue, the fills, and the delivery of what they encode.

Every device loads its own local batch and encodes it, but for the samples that the plan's fills
give to others: their batch fields are sent ahead. A side input is sent to each other device with a
stage that reads it, by whoever has it, as soon as the fills that cover its rows are done.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from lightning_dpipe.core.fills import Run, encoders, fill_slots
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Fill
from lightning_dpipe.core.program import (
    Encode,
    Instruction,
    Lane,
    Message,
    PostRows,
    SendRows,
    When,
)
from lightning_dpipe.lowering.context import Lowering
from lightning_dpipe.lowering.rows import BatchLayout, layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """Rows ``[first, last)`` of `value`, of the local batch of device `owner`, to a device."""

    value: int
    owner: int
    target: int
    first: int
    last: int


class EncodeEmitter:
    """Frozen work of one device, placed before, between and after its ops."""

    def __init__(self, lowering: Lowering, device: int) -> None:
        self.low = lowering
        self.device = device
        self.ahead = lowering.next_graph or lowering.graph
        self.next_layout: BatchLayout | None = None
        self.fills: Mapping[tuple[int, int], Sequence[Fill]] = {}
        self.runs: tuple[Run, ...] = ()
        self.unsent: list[_Transfer] = []
        self.done: dict[tuple[int, int], list[tuple[int, int]]] = {}
        if lowering.shape.next_sizes is not None:
            sizes = lowering.shape.next_sizes
            # Bounds matter only for cutting messages, so a short next batch may have fewer parts.
            parts = min(lowering.plan.num_microbatches, sum(sizes))
            self.next_layout = layout(sizes, lowering.ranks, parts)
            self.fills = fill_slots(lowering.plan, self.ahead, lowering.orders, lowering.shape)
            self.runs = encoders(chain.from_iterable(self.fills.values()), sizes)
            self.unsent = self._transfers(self.next_layout, self.runs, self.device, None)

    def prologue(self) -> list[Instruction]:
        """Everything before the first op."""
        out: list[Instruction] = []
        low = self.low
        if not low.shape.encoded:
            runs = encoders((), low.layout.sizes)
            out += self._posts(low.layout, runs, When.THIS)
            size = low.layout.sizes[self.device]
            fields = self._transfers(low.layout, runs, self.device, frozenset(low.graph.inputs))
            out += [self._send(t, When.THIS) for t in fields]
            if size:
                out += [
                    Encode(
                        component=c.name,
                        start=start,
                        stop=stop,
                        first=0,
                        last=size,
                        when=When.THIS,
                    )
                    for c in low.graph.frozen
                    for start, stop in _working(low.graph, c.name, 0, len(c.layers))
                ]
            encoded = frozenset(low.graph.side_inputs) - frozenset(low.graph.inputs)
            rest = self._transfers(low.layout, runs, self.device, encoded)
            out += [self._send(t, When.THIS) for t in rest]
        if self.next_layout is not None:
            out += self._posts(self.next_layout, self.runs, When.NEXT)
            size = self.next_layout.sizes[self.device]
            for value in self.ahead.inputs:
                self.done[value, self.device] = [(0, size)]
            out += self._flush()
        return [*out, *self.after(0)]

    def after(self, num_ops: int) -> list[Instruction]:
        """Fills placed when the device has done `num_ops` of its ops."""
        out: list[Instruction] = []
        for fill in self.fills.get((self.device, num_ops), ()):
            working = _working(self.ahead, fill.component, fill.start, fill.stop)
            out += [self._encode(replace(fill, start=a, stop=b)) for a, b in working]
            for layer in self.ahead.component(fill.component).layers[fill.start : fill.stop]:
                for value in layer.writes:
                    _add_range(self.done.setdefault((value, fill.home), []), fill.first, fill.last)
            out += self._flush()
        return out

    def _encode(self, fill: Fill) -> Encode:
        layers = self.ahead.component(fill.component).layers[fill.start : fill.stop]
        read = {v for layer in layers for v in layer.reads}
        mine = [r for r in self.runs if (r.owner, r.device) == (fill.home, self.device)]
        return Encode(
            component=fill.component,
            start=fill.start,
            stop=fill.stop,
            first=fill.first,
            last=fill.last,
            when=When.NEXT,
            owner=None if fill.home == self.device else fill.home,
            fields=tuple(v for v in self.ahead.frozen_fields if v in read)
            if fill.home != self.device
            else (),
            rows=sum(r.last - r.first for r in mine),
        )

    def _flush(self) -> list[Instruction]:
        """Send every message whose rows are now complete."""
        ready = [
            t
            for t in self.unsent
            if _covers(self.done.get((t.value, t.owner), ()), t.first, t.last)
        ]
        self.unsent = [t for t in self.unsent if t not in ready]
        return [self._send(t, When.NEXT) for t in ready]

    def _transfers(
        self, cut: BatchLayout, runs: Sequence[Run], source: int, only: frozenset[int] | None
    ) -> list[_Transfer]:
        """All row messages that a device sends, early rows first; `only` of some values."""
        inputs, found = self._graph_of(cut).inputs, list[_Transfer]()
        whole = [Run(source, source, 0, cut.sizes[source])]
        encoded = [run for run in runs if run.device == source]
        for value in self.low.graph.side_inputs:
            if only is None or value in only:
                found += self._to_readers(cut, value, whole if value in inputs else encoded)
        if only is None:
            found += self._to_encoders(cut, runs, source)
        return sorted(found, key=lambda t: t.first)

    def _to_readers(self, cut: BatchLayout, value: int, held: Sequence[Run]) -> list[_Transfer]:
        """Rows that a device has of a value, to the other devices whose stages read them."""
        return [
            _Transfer(value=value, owner=run.owner, target=target, first=low, last=high)
            for target in range(len(self.low.ranks))
            for run in held
            if target != run.device
            for first, last in self._read(cut, value, run.owner, target)
            for low, high in [(max(first, run.first), min(last, run.last))]
            if low < high
        ]

    def _to_encoders(self, cut: BatchLayout, runs: Sequence[Run], source: int) -> list[_Transfer]:
        """A device's batch fields, to who encodes its samples, unless its stages read them."""
        return [
            _Transfer(value=value, owner=source, target=run.device, first=first, last=last)
            for run in runs
            if run.owner == source != run.device
            for value in self._graph_of(cut).frozen_fields
            for first, last in _without(
                (run.first, run.last),
                self._read(cut, value, source, run.device)
                if value in self.low.graph.side_inputs
                else (),
            )
        ]

    def _graph_of(self, cut: BatchLayout) -> ModelGraph:
        return self.ahead if cut is self.next_layout else self.low.graph

    def _read(
        self, cut: BatchLayout, value: int, owner: int, target: int
    ) -> Sequence[tuple[int, int]]:
        """Ranges of an owner's samples that the stages on a device read, a message each."""
        low = self.low
        if not low.readers_on(target, value):
            return ()
        when = When.NEXT if cut is self.next_layout else When.THIS
        num_bytes = low.known(value, when).bytes_per_sample
        return cut.chunks(owner, low.shares(target, cut), num_bytes)

    def _posts(self, cut: BatchLayout, runs: Sequence[Run], when: When) -> list[Instruction]:
        """Receives of what other devices send; `receive` puts them in the senders' order."""
        return [
            PostRows(
                message=self._message(source, t, when),
                value=t.value,
                device=t.owner,
                first=t.first,
                last=t.last,
                when=when,
            )
            for source in range(len(self.low.ranks))
            if source != self.device
            for t in self._transfers(cut, runs, source, None)
            if t.target == self.device
        ]

    def _send(self, t: _Transfer, when: When) -> SendRows:
        return SendRows(
            message=self._message(self.device, t, when),
            value=t.value,
            first=t.first,
            last=t.last,
            when=when,
            owner=None if t.owner == self.device else t.owner,
        )

    def _message(self, source: int, t: _Transfer, when: When) -> Message:
        spec = self.low.buffer(t.value, t.last - t.first, when)
        guest = "" if t.owner == source else f"@{t.owner}"
        return Message(
            channel=self.low.channel(source, t.target, Lane.ROWS),
            tag=f"{t.value}:{when.value}:{t.first}:{t.last}{guest}",
            shape=spec.shape,
            dtype=spec.dtype,
        )


def _working(graph: ModelGraph, component: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs of layers within a range that do something: what is kept leaves others idle."""
    layers = graph.component(component).layers[start:stop]
    at = start
    for working, same in groupby(bool(layer.reads or layer.writes) for layer in layers):
        end = at + len(tuple(same))
        if working:
            yield at, end
        at = end


def _add_range(ranges: list[tuple[int, int]], first: int, last: int) -> None:
    """Insert ``[first, last)`` and join what touches."""
    ranges.append((first, last))
    ranges.sort()
    joined = [ranges[0]]
    for low, high in ranges[1:]:
        if low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    ranges[:] = joined


def _covers(ranges: Sequence[tuple[int, int]], first: int, last: int) -> bool:
    return any(low <= first and last <= high for low, high in ranges)


def _without(wanted: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of a range when ascending others are taken out."""
    (at, last), left = wanted, []
    for low, high in ranges:
        if at < min(low, last):
            left.append((at, min(low, last)))
        at = max(at, high)
    if at < last:
        left.append((at, last))
    return left

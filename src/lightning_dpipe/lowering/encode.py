"""Frozen work of a step: the prologue, the fills, and the delivery of what they encode.

Every device encodes its own local batch. A side input is sent to each other device with a stage
that reads it, as soon as the fills that cover its rows are done.
"""

from collections.abc import Mapping, Sequence

from lightning_dpipe.core.fills import fill_slots
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


class EncodeEmitter:
    """Frozen work of one device, placed before, between and after its ops."""

    def __init__(self, lowering: Lowering, device: int) -> None:
        self.low = lowering
        self.device = device
        self.next_layout: BatchLayout | None = None
        self.fills: Mapping[tuple[int, int], Sequence[Fill]] = {}
        self.unsent: list[tuple[int, int, int, int]] = []
        self.done: dict[int, list[tuple[int, int]]] = {}
        if lowering.shape.next_sizes is not None:
            sizes = lowering.shape.next_sizes
            # Bounds matter only for cutting messages, so a short next batch may have fewer parts.
            parts = min(lowering.plan.num_microbatches, sum(sizes))
            self.next_layout = layout(sizes, lowering.ranks, parts)
            self.fills = fill_slots(lowering.plan, lowering.graph, lowering.orders, lowering.shape)
            self.unsent = self._transfers(self.next_layout, self.device, None, When.NEXT)

    def prologue(self) -> list[Instruction]:
        """Everything before the first op."""
        out: list[Instruction] = []
        low = self.low
        if not low.shape.encoded:
            out += self._posts(low.layout, When.THIS)
            size = low.layout.sizes[self.device]
            fields = self._transfers(
                low.layout, self.device, frozenset(low.graph.inputs), When.THIS
            )
            out += [self._send(t, When.THIS) for t in fields]
            if size:
                out += [
                    Encode(
                        component=c.name,
                        start=0,
                        stop=len(c.layers),
                        first=0,
                        last=size,
                        when=When.THIS,
                    )
                    for c in low.graph.frozen
                ]
            encoded = frozenset(low.graph.side_inputs) - frozenset(low.graph.inputs)
            rest = self._transfers(low.layout, self.device, encoded, When.THIS)
            out += [self._send(t, When.THIS) for t in rest]
        if self.next_layout is not None:
            out += self._posts(self.next_layout, When.NEXT)
            size = self.next_layout.sizes[self.device]
            for value in low.graph.inputs:
                self.done[value] = [(0, size)]
            out += self._flush()
        return [*out, *self.after(0)]

    def after(self, num_ops: int) -> list[Instruction]:
        """Fills placed when the device has done `num_ops` of its ops."""
        out: list[Instruction] = []
        for fill in self.fills.get((self.device, num_ops), ()):
            out.append(
                Encode(
                    component=fill.component,
                    start=fill.start,
                    stop=fill.stop,
                    first=fill.first,
                    last=fill.last,
                    when=When.NEXT,
                )
            )
            for layer in self.low.graph.component(fill.component).layers[fill.start : fill.stop]:
                for value in layer.writes:
                    _add_range(self.done.setdefault(value, []), fill.first, fill.last)
            out += self._flush()
        return out

    def _flush(self) -> list[Instruction]:
        """Send every message whose rows are now complete."""
        ready = [t for t in self.unsent if _covers(self.done.get(t[0], ()), t[2], t[3])]
        self.unsent = [t for t in self.unsent if t not in ready]
        return [self._send(t, When.NEXT) for t in ready]

    def _transfers(
        self, cut: BatchLayout, source: int, only: frozenset[int] | None, when: When
    ) -> list[tuple[int, int, int, int]]:
        """(value, target, first, last) of all row messages a device sends, early rows first."""
        low = self.low
        found = [
            (value, target, first, last)
            for value in low.graph.side_inputs
            if only is None or value in only
            for target in range(len(low.ranks))
            if target != source and low.readers_on(target, value)
            for first, last in cut.chunks(
                source,
                low.shares(target, cut),
                low.known(value, when).bytes_per_sample,
            )
        ]
        return sorted(found, key=lambda t: t[2])

    def _posts(self, cut: BatchLayout, when: When) -> list[Instruction]:
        """Receives of rows that other devices encode; `receive` puts them in the senders' order."""
        return [
            PostRows(
                message=self._message(source, self.device, value, first, last, when),
                value=value,
                device=source,
                first=first,
                last=last,
                when=when,
            )
            for source in range(len(self.low.ranks))
            if source != self.device
            for value, target, first, last in self._transfers(cut, source, None, when)
            if target == self.device
        ]

    def _send(self, transfer: tuple[int, int, int, int], when: When) -> SendRows:
        value, target, first, last = transfer
        message = self._message(self.device, target, value, first, last, when)
        return SendRows(message=message, value=value, first=first, last=last, when=when)

    def _message(
        self, source: int, target: int, value: int, first: int, last: int, when: When
    ) -> Message:
        spec = self.low.buffer(value, last - first, when)
        return Message(
            channel=self.low.channel(source, target, Lane.ROWS),
            tag=f"{value}:{when.value}:{first}:{last}",
            shape=spec.shape,
            dtype=spec.dtype,
        )


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

"""`EncodingCache`: encodings made in one epoch's bubbles, kept and used again in the next.

In:     rows of frozen layers' inputs and outputs as they pass, on the rank that encodes them.
Out:    on the rank that loads a batch: the groups of values that are kept of all its samples.

An entry's name says what was encoded (the elements that the layers read, so the file's content and
all that the data pipeline did to it) and by whom (weights, code, versions, precision, device), so
an entry can be missing but never be the wrong one. Files are written by a thread of its own.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dpipe.core.caching import CacheCut, KeptGroup
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.runtime.bound import BoundLayer
from lightning_dpipe.runtime.encodings import Encodings
from lightning_dpipe.runtime.transport import torch_dtype
from lightning_dpipe.strategy.cache.entries import Entries, entry_key

log = logging.getLogger(__name__)

_MOST_WAITING = 4
"""Steps whose entries may wait for the disk; then training waits too, so that memory is bounded."""
_READERS = 4
"""Threads that hash and read a batch's entries: both let go of Python's lock."""


@dataclass(slots=True)
class _Seen:
    """Rows from `first` of one value, on their way to the host; `ready`: None if they are there."""

    first: int
    rows: Tensor
    ready: Any

    def row(self, index: int) -> Tensor:
        return self.rows[index - self.first]


class EncodingCache:
    """Keeps what frozen layers write and finds it again.

    Args:
        cut: What is kept.
        layers: The frozen components' layers, by component.
        entries: The files.
        marks: For each group of the cut: a digest of who encodes.
    """

    def __init__(
        self,
        *,
        cut: CacheCut,
        layers: Mapping[str, Sequence[BoundLayer]],
        entries: Entries,
        marks: Sequence[str],
    ) -> None:
        self.cut = cut
        self.entries = entries
        self.watched = cut.sources.union(cut.kept)
        self.hits = self.misses = 0
        self._marks = tuple(marks)
        self._choices = [layers[component][index] for component, index in cut.choices]
        self._seen: dict[tuple[int, int], dict[int, list[_Seen]]] = {}
        self._waiting: deque[Future[None]] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="keep-encodings")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-encodings")
        self._writes = True

    # On the rank that encodes

    def see(self, value: int, bank: Encodings, owner: int, first: int, tensor: Tensor) -> None:
        """Take a copy of rows that pass; see `runtime.frozen.Keeper`."""
        if not self._writes:
            return
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        ready = None
        if tensor.is_cuda:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        seen = self._seen.setdefault((id(bank), owner), {})
        seen.setdefault(value, []).append(_Seen(first, host, ready))

    def step_ended(self) -> None:
        """Hand what the step has encoded to the writer."""
        seen, self._seen = self._seen, {}
        jobs = [job for batch in seen.values() for job in self._jobs(batch)]
        if not jobs:
            return
        self._waiting.append(self._writer.submit(self._write, jobs))
        while len(self._waiting) > _MOST_WAITING or (self._waiting and self._waiting[0].done()):
            self._waiting.popleft().result()

    def settle(self) -> None:
        """Wait until everything handed over is on disk."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Finish writing and let the threads go."""
        self.settle()
        self._writer.shutdown()
        self._readers.shutdown()

    def _jobs(
        self, batch: Mapping[int, Sequence[_Seen]]
    ) -> list[tuple[int, list[tuple[int, _Seen]]]]:
        """(group, rows of its sources and kept values) of each sample that passed completely."""
        jobs = []
        for number, group in enumerate(self.cut.groups):
            values = (*group.sources, *group.kept)
            by_row = [
                {
                    first: s
                    for s in batch.get(v, ())
                    for first in range(s.first, s.first + len(s.rows))
                }
                for v in values
            ]
            for row in sorted(set(by_row[0]).intersection(*by_row[1:])):
                jobs.append((number, [(row, rows[row]) for rows in by_row]))
        return jobs

    def _write(self, jobs: Sequence[tuple[int, Sequence[tuple[int, _Seen]]]]) -> None:
        for number, found in jobs:
            if not self._writes:
                return
            for _, seen in found:
                if seen.ready is not None:
                    seen.ready.synchronize()
            group = self.cut.groups[number]
            rows = [seen.row(row) for row, seen in found]
            count = len(group.sources)
            kept = {str(i): tensor for i, tensor in enumerate(rows[count:])}
            try:
                self.entries.write(entry_key(self._marks[number], rows[:count]), kept)
            except OSError as error:
                # A full disk takes the shortcut away, not the training: encoding goes on as before.
                self._writes = False
                log.warning(
                    "encodings are no longer kept in %s: %s; free some space or give another "
                    "cache_dir and start again",
                    self.entries.folder, error,
                )  # fmt: skip

    # On the rank that loads

    def recall(
        self, fields: Mapping[int, Tensor], graph: ModelGraph
    ) -> dict[int, dict[int, Tensor]]:
        """What is kept of a whole batch: by group, ``[batch, ...]`` by value.

        Args:
            fields: The batch fields on the host as the layers will read them, draw keys too.
            graph: That of the batch's shape class.
        """
        values = dict(fields)
        with torch.no_grad():
            for layer in self._choices:
                values |= layer.run(values)
        count = len(next(iter(fields.values())))
        found = {}
        for number, group in enumerate(self.cut.groups):
            rows = [[values[v][row] for v in group.sources] for row in range(count)]
            keys = list(self._readers.map(partial(entry_key, self._marks[number]), rows))
            unique = list(dict.fromkeys(keys))
            entries = dict(zip(unique, self._readers.map(self.entries.read, unique), strict=True))
            kept = _stacked([entries[key] for key in keys], group, graph)
            if kept is not None:
                found[number] = kept
        self.hits += len(found) == len(self.cut.groups)
        self.misses += len(found) < len(self.cut.groups)
        return found


def _stacked(
    entries: Sequence[Mapping[str, Tensor] | None], group: KeptGroup, graph: ModelGraph
) -> dict[int, Tensor] | None:
    """A group's values of a batch, if there is a fitting entry for every sample."""
    stacked = {}
    for i, value in enumerate(group.kept):
        rows = [row for e in entries if e is not None and (row := e.get(str(i))) is not None]
        known = graph.values[value]
        kinds = {(tuple(row.shape), row.dtype) for row in rows}
        if len(rows) < len(entries) or kinds != {(known.shape, torch_dtype(known.dtype))}:
            return None
        stacked[value] = torch.stack(rows)
    return stacked

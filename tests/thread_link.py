"""Lets thread ranks exchange objects, as `collectives.HostLink` does for processes."""

import threading
from dataclasses import dataclass
from typing import Any


class Joint:
    """What the ranks share."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.values: list[Any] = [None] * num_ranks


@dataclass
class ThreadLink:
    """One rank's end."""

    rank: int
    joint: Joint

    def gather_objects(self, value: Any) -> list[Any]:
        """One object of every rank, by rank."""
        self.joint.values[self.rank] = value
        self.joint.barrier.wait()
        every = list(self.joint.values)
        self.joint.barrier.wait()
        return every

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The object of rank `source`."""
        every: list[Any] = self.gather_objects(value)
        return every[source]

    def compare(self, what: str, mark: str) -> None:
        """All ranks hold the same thing."""
        assert len(set(self.gather_objects(mark))) == 1, what

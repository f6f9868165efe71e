"""Who loads first: where several ranks of a machine would download the same files, one does.

In: `in_turn` around a load, wherever it happens. Out: what it returns; `taking_turns` decides when.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

Turns = Callable[[str, Callable[[], Any]], Any]
"""``turns(what, load)`` calls `load` in turn; `what` is the same on all ranks."""

_TURNS: ContextVar[Turns | None] = ContextVar("turns", default=None)


def in_turn(what: str, load: Callable[[], T]) -> T:
    """Load, after the rank that loads `what` first, if there are others."""
    turns = _TURNS.get()
    return load() if turns is None else turns(what, load)


@contextmanager
def taking_turns(turns: Turns) -> Iterator[None]:
    """Let `turns` order the loads of the block."""
    token = _TURNS.set(turns)
    try:
        yield
    finally:
        _TURNS.reset(token)

"""Every way to spoil one place of a JSON file: another value, one too few, one too many."""

import copy
from collections.abc import Iterator
from typing import Any

WRONG = (None, "x", "", -1, 0, 1, 7, 10**30, 1.5, float("nan"), float("inf"), True, [], {}, [1])
"""What is put in place of each value: other types, other signs, far too large."""


def edits(data: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, the edited file) for each key, entry and value of `data`."""
    for path in _paths(data):
        where = ".".join(map(str, path)) or "all of it"
        for value in WRONG:
            yield f"{where} = {value}", _with(data, path, value)
        if path:
            less = copy.deepcopy(data)
            del _at(less, path[:-1])[path[-1]]
            yield f"no {where}", less
            if isinstance(path[-1], int):
                more = copy.deepcopy(data)
                _at(more, path[:-1]).insert(path[-1], _at(data, path))
                yield f"{where} twice", more


def _paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _paths(value, (*at, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _paths(value, (*at, index))


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def _with(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    edited = copy.deepcopy(data)
    _at(edited, path[:-1])[path[-1]] = value
    return edited

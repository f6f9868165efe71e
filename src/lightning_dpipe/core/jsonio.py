"""JSON round trip and digests for the frozen dataclasses of `core`.

Tuples are lists in the file, enums their value, and unknown keys are refused: a file from a newer
version fails loudly instead of losing a field.
"""

import hashlib
import json
import math
import types
import typing
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lightning_dpipe.core.errors import DPipeError

T = TypeVar("T")


def to_data(value: object) -> Any:
    """Turn a dataclass (or a container of them) into plain JSON data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_data(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): to_data(v) for k, v in value.items()}
    return value


def from_data(kind: Any, data: Any, where: str = "") -> Any:
    """Rebuild a value of annotated type `kind` from what `to_data` made.

    Args:
        kind: A dataclass, or the type of one of its fields.
        data: Plain JSON data, perhaps edited by hand: every value's type is looked at.
        where: Name of the value in messages.

    Raises:
        DPipeError: A key is missing or unknown, or a value is of another type.
    """
    where = where or getattr(kind, "__name__", "the data")
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return from_data(next(a for a in args if a is not type(None)), data, where)
    if origin is tuple:
        return _tuple_from(args, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise _wrong(where, data, "an object {...}")
        return {k: from_data(args[1], v, f"{where}[{k!r}]") for k, v in data.items()}
    if is_dataclass(kind):
        return _dataclass_from(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
        if data not in values:
            raise _wrong(where, data, f"one of {', '.join(map(str, values))}")
        return kind(data)
    if kind in _LEAVES and not _is_leaf(kind, data):
        raise _wrong(where, data, _LEAVES[kind])
    return data


_LEAVES = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}


def _is_leaf(kind: Any, data: object) -> bool:
    if isinstance(data, bool):
        return kind is bool
    if kind is float:
        return isinstance(data, int | float) and math.isfinite(data)
    return isinstance(data, kind)


def _wrong(where: str, data: object, expected: str) -> DPipeError:
    text = repr(data)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return DPipeError(f"{where} is {shown}; expected {expected}")


def _tuple_from(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise _wrong(where, data, "a list [...]")
    inner = args
    if len(args) == 2 and args[1] is Ellipsis:
        inner = args[:1] * len(data)
    if len(inner) != len(data):
        raise _wrong(where, data, f"a list of {len(inner)}")
    return tuple(
        from_data(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(inner, data, strict=True))
    )


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _dataclass_from(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(where, data, "an object {...}")
    hints = _hints(kind)
    unknown = sorted(set(map(str, data)) - set(hints))
    if unknown:
        raise DPipeError(
            f"{where} has no field {unknown[0]!r} (fields: {', '.join(hints)}); it is no "
            f"{kind.__name__}, or one of another version of lightning-dpipe: make it again"
        )
    needed = [f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing = [f.name for f in needed if f.name not in data]
    if missing:
        raise DPipeError(f"{where} lacks {', '.join(missing)}; make the file again")
    return kind(**{n: from_data(hints[n], v, f"{where}.{n}") for n, v in data.items()})


def dumps(value: object) -> str:
    """Serialise with sorted keys, so that equal values give equal text."""
    return json.dumps(to_data(value), sort_keys=True, separators=(",", ":"))


def digest(value: object) -> str:
    """Short content hash (16 hex digits) that ranks compare before the first step."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()[:16]


def save(value: object, path: Path) -> None:
    """Write atomically: a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(
        f"{path.name}.{uuid.uuid4().hex[:8]}.part"
    )  # ranks may write side by side
    part.write_text(json.dumps(to_data(value), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def load(kind: type[T], path: Path) -> T:
    """Read what `save` wrote.

    Raises:
        DPipeError: The file is not JSON or not a `kind`; the message names it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no text at all, or nested without end
        raise DPipeError(f"{path} is not JSON ({error}); make the file again") from error
    try:
        loaded: T = from_data(kind, data)
    except DPipeError as error:
        raise type(error)(f"{path}: {error}") from error
    return loaded

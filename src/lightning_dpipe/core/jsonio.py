"""JSON round trip and digests for the frozen dataclasses of `core`.

Tuples are lists in the file, enums their value, and unknown keys are refused: a file from a newer
version fails loudly instead of losing a field.
"""

import hashlib
import json
import types
import typing
import uuid
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
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


def from_data(kind: Any, data: Any) -> Any:
    """Rebuild a value of annotated type `kind` from what `to_data` made.

    Raises:
        DPipeError: A key is missing or unknown.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return from_data(next(a for a in args if a is not type(None)), data)
    if origin is tuple:
        inner = args[:1] * len(data) if len(args) == 2 and args[1] is Ellipsis else args
        return tuple(from_data(k, v) for k, v in zip(inner, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {k: from_data(args[1], v) for k, v in data.items()}
    if is_dataclass(kind):
        return _dataclass_from(kind, data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    return data


def _dataclass_from(kind: Any, data: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise DPipeError(
            f"{kind.__name__} has no field {unknown[0]!r} (fields: {', '.join(hints)}); "
            "the file is of another version of lightning-dpipe, make it again"
        )
    try:
        return kind(**{name: from_data(hints[name], value) for name, value in data.items()})
    except TypeError as error:
        raise DPipeError(f"{kind.__name__} cannot be read: {error}; make the file again") from error


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
        DPipeError: The file is not JSON or not a `kind`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DPipeError(f"{path} is not JSON ({error}); make the file again") from error
    loaded: T = from_data(kind, data)
    return loaded

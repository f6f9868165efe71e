"""Build a model without memory for its weights: what would make them is recorded, and run later.

In:     code that builds modules, run inside `recording`.
Out:    modules whose parameters are on meta, and a `Recording` that computes any of them: the same
        bits that the code would have made at once, in any order, for any subset.

A parameter that is registered before anything was written to it goes to meta, and every operation
on it is kept in a log. A random operation is kept with its generator's state, and run once on
scratch memory of one tensor, so that the numbers of all others, and the generator afterwards, are
those of a plain build. Whatever had a value when it was registered stays as it is.

Limits: code that reads a weight's value gets it (it is computed there and then), unless it leaves
torch to do so (``.numpy()``): that raises, and the caller builds plainly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from lightning_dpipe.models.oplog import (
    OVERWRITES,
    Op,
    OpLog,
    Storage,
    covers,
    generator_of,
    key_of,
    on_meta,
    ref_of,
    unseen,
)

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
}


class _Absent(nn.Parameter):
    """A parameter on meta that does not say so: torch's initialisers leave those on meta alone."""

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """The truth again once the build is over."""
        return _CURRENT.get() is None


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The log of one build. Enter it through `recording`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = OpLog()
        self._fresh: dict[int, Tensor] = {}  # made by empty(), nothing written yet
        self._moved: dict[int, Tensor] = {}  # storages whose parameter went to meta -> its tensor
        self._parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Whether `value` can compute it."""
        return tensor in self.log

    def value(self, tensor: Tensor) -> Tensor:
        """What a plain build would have made of a deferred tensor; memory of its own.

        Other tensors are returned as they are.
        """
        if not self.knows(tensor):
            return tensor
        with unseen(), torch.no_grad():
            return self.log.value(tensor)

    def lazy(self, read: Callable[[], Tensor], like: Tensor) -> Tensor:
        """A tensor on meta whose value `read` returns when it is asked for, e.g. from a file."""
        with unseen():
            made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        device = torch.device("cpu")
        self._log(read, (), {}, results=(made,), device=device)
        return made

    def defer(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter on meta if it holds no value yet, else as it is."""
        if id(parameter) in self._parameters:
            return self._parameters[id(parameter)][1]
        key = key_of(parameter)
        if key not in self._fresh or not covers(parameter):
            return parameter
        del self._fresh[key]
        with unseen(), torch.no_grad():
            storage = parameter.untyped_storage()
            num_bytes, device = storage.nbytes(), parameter.device
            made = torch.empty_like(parameter.detach(), device="meta")
            absent: Any = made.as_subclass(_Absent).requires_grad_(parameter.requires_grad)
            absent.__dict__.update(parameter.__dict__)
            self.log.storages[key_of(absent)] = Storage(absent, device, num_bytes)
            storage.resize_(0)
        # Code may still hold the original: what it does to that is done to the one on meta.
        self._moved[key] = absent
        self._parameters[id(parameter)] = (parameter, absent)
        return cast(nn.Parameter, absent)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run what concerns real tensors, log what concerns deferred ones."""
        kwargs = kwargs or {}
        if self._moved:
            args, kwargs = tree_map(self._current, (tuple(args), kwargs))
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        changed = _changed(func, args, kwargs)
        if not any(self.knows(t) for t in tensors):
            out = func(*args, **kwargs)
            for tensor in changed:
                self._fresh.pop(key_of(tensor), None)
            if func in _EMPTY and not on_meta(out):
                self._fresh[key_of(out)] = out
            return out
        if any(not self.knows(t) for t in changed) or not _returns_tensors(func):
            for tensor in changed:
                self._fresh.pop(key_of(tensor), None)
            with unseen():
                real = tree_map(self._real, (tuple(args), kwargs))
                return func(*real[0], **real[1])
        return self._defer_op(func, tuple(args), kwargs, changed)

    def _defer_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Sequence[Tensor]
    ) -> Any:
        known = next(t for t in tree_iter((args, kwargs)) if t in self.log)
        device = self.log.storages[key_of(known)].device
        state = self._draw(func, args, kwargs, device) if _draws(func) else None
        with unseen():
            on_meta = tree_map(_to_meta, (args, kwargs))
            out = func(*on_meta[0], **on_meta[1])
        if func is torch.ops.aten.detach.default and isinstance(args[0], _Absent):
            out = out.as_subclass(_Absent)  # nn.Parameter(absent) insists on it
        results = tuple(t for t in tree_iter(out) if isinstance(t, Tensor))
        new = tuple(t for t in results if key_of(t) not in self.log.storages)
        if changed or new:
            drawn = None if state is None else (generator_of(kwargs, device), state)
            self._log(func, args, kwargs, drawn=drawn, results=new, device=device, changed=changed)
        return out

    def _log(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        results: Sequence[Tensor],
        device: torch.device,
        changed: Sequence[Tensor] = (),
        drawn: tuple[torch.Generator | None, Tensor | None] | None = None,
    ) -> None:
        for tensor in results:
            num_bytes = tensor.untyped_storage().nbytes()
            self.log.storages[key_of(tensor)] = Storage(tensor, device, num_bytes)
        refs = tree_map(self._frozen_copy, (args, kwargs))
        op = Op(
            index=self.log.count,
            call=call,
            args=refs[0],
            kwargs=refs[1],
            generator=None if drawn is None else drawn[0],
            state=None if drawn is None else drawn[1],
            outputs=tuple(key_of(t) for t in results),
            overwrites=call in OVERWRITES and all(covers(t) for t in changed),
        )
        self.log.count += 1
        for tensor in (*results, *changed):
            self.log.storages[key_of(tensor)].ops.append(op)

    def _draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> Tensor:
        """The generator's state before a random operation, which is run on scratch memory."""
        state = generator_of(kwargs, device).get_state()

        def scratch(value: Any) -> Any:
            if value not in self.log:
                return value
            return torch.zeros(value.shape, dtype=value.dtype, device=device)

        with unseen(), torch.no_grad():
            used = tree_map(scratch, (args, kwargs))
            func(*used[0], **used[1])
        return state

    def _is_known(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self.knows(value)

    def _real(self, value: Any) -> Any:
        return self.value(value) if value in self.log else value

    def _frozen_copy(self, value: Any) -> Any:
        """What the log keeps of an argument: real tensors may be changed later."""
        if value in self.log:
            return ref_of(value)
        if isinstance(value, Tensor):
            with unseen():
                return value.detach().clone()
        return value

    def _current(self, value: Any) -> Any:
        """The tensor on meta for one whose parameter was moved there."""
        if not isinstance(value, Tensor) or on_meta(value):
            return value
        absent = self._moved.get(key_of(value))
        if absent is None:
            return value
        with unseen():
            return absent.as_strided(value.size(), value.stride(), value.storage_offset())


_CURRENT: ContextVar[Recording | None] = ContextVar("recording", default=None)


def current_recording() -> Recording | None:
    """The recording that is on, if any."""
    return _CURRENT.get()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the builds of the block: see the module's text."""
    made = Recording()
    plain = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        on = _CURRENT.get() is made and isinstance(param, nn.Parameter)
        plain(self, name, made.defer(param) if on and param is not None else param)

    token = _CURRENT.set(made)
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False
    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with made:
            yield made
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
        deterministic.fill_uninitialized_memory = fills
        _CURRENT.reset(token)
        for _, absent in made._parameters.values():
            absent.__class__ = nn.Parameter
        made._fresh.clear()
        made._moved.clear()
        made._parameters.clear()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Build plainly inside a recording: what a library reads from files, perhaps in threads."""
    token = _CURRENT.set(None)
    try:
        with unseen():
            yield
    finally:
        _CURRENT.reset(token)


def fill_in(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter on meta its value; the object stays the same, so that ties hold."""
    real = nn.Parameter(value, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.clear_autocast_cache()  # its copies of weights point back at them
    swap: Any = torch.utils.swap_tensors
    swap(parameter, real)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not on_meta(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return value


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments that an operation writes to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [t for t in tree_iter(value) if isinstance(t, Tensor)]
    return found


def _returns_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all("Tensor" in str(r.type) for r in returns)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags

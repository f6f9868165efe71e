"""Call a layer without data and without arithmetic: on fake tensors, which have shapes only.

In:     a callable, fake arguments, the device and autocast dtype it will run under.
Out:    its outputs (fake), the weights autograd saw it use, and whether it drew random numbers.
Weights may be anywhere, also on meta; those that are not on the device get a stand-in for the
call, so that nothing about the model is touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one call did: `weights` are the leaves that its outputs' gradients reach."""

    outputs: Any
    weights: tuple[Tensor, ...]
    draws: bool


class FakeRunner:
    """Runs callables on fake tensors of one device, under one autocast dtype.

    `weights` are the tensors that will be moved to `device` before the model runs.
    """

    def __init__(
        self, device: torch.device, autocast: torch.dtype | None, weights: Iterable[Tensor]
    ) -> None:
        self.device = device
        self._autocast = autocast
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stand_ins = _StandIns(self._mode, device, weights)

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Make a fake tensor, on the runner's device if none is given."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device or self.device)

    def leaf(self, tensor: Tensor) -> Tensor:
        """Cut a fake tensor from the graph that made it, keeping its strides."""
        with self._mode:
            return tensor.detach().requires_grad_(tensor.requires_grad)

    def like(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make fake leaves that look like others, with memory of their own, shared as theirs is."""
        memory: dict[int, Tensor] = {}
        made = []
        with self._mode:
            for t in tensors:
                storage = t.untyped_storage()
                if storage._cdata not in memory:
                    size = storage.nbytes() // t.element_size()
                    memory[storage._cdata] = torch.empty(size, dtype=t.dtype, device=t.device)
                view = memory[storage._cdata].as_strided(t.shape, t.stride(), t.storage_offset())
                made.append(view.detach().requires_grad_(t.requires_grad))
        return tuple(made)

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Tensor],
        *,
        grad: bool,
        watch: AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        """Run ``fn(*args)`` on fake `args`; `watch` (a dispatch mode) sees every op."""
        draws = _DrawWatch()
        with ExitStack() as stack:
            watches = (draws, watch or nullcontext())
            for context in (self._mode, *watches, self._stand_ins, *self._modes(grad)):
                stack.enter_context(context)
            outputs = fn(*args)
        found = _leaves(outputs) if grad else ()
        weights = tuple(self._stand_ins.original(t) for t in found if not any(t is a for a in args))
        return Outcome(outputs=outputs, weights=weights, draws=draws.seen)

    def backward(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor] | None,
        *,
        watch: AbstractContextManager[Any],
    ) -> tuple[Tensor, ...]:
        """Compute gradients, kept by no tensor; the graph stays for another call.

        Args:
            outputs: What `call` returned; those without a graph are left out.
            inputs: Leaves to find gradients of; None for all, weights too.
            watch: A dispatch mode that sees every op.

        Returns:
            The leaves, weights as their stand-ins.
        """
        roots = [t for t in outputs if t.grad_fn is not None]
        leaves = tuple(_leaves(roots) if inputs is None else inputs)
        if roots and leaves:
            with self._mode:
                ones = [torch.ones_like(t) for t in roots]
                with watch:
                    torch.autograd.grad(roots, leaves, ones, retain_graph=True, allow_unused=True)
        return leaves

    def stand_in(self, weight: Tensor) -> Tensor:
        """What layers see for `weight`: itself, or its stand-in."""
        return self._stand_ins.replacement(weight)

    def _modes(self, grad: bool) -> tuple[Any, ...]:
        autocast = torch.autocast(
            self.device.type,
            dtype=self._autocast,
            enabled=self._autocast is not None,
            cache_enabled=False,
        )
        return torch.set_grad_enabled(grad), autocast


def device_of(weights: Iterable[Tensor]) -> torch.device:
    """Where a model lives: the device of its first weight that is not on meta, else the cpu."""
    return next((t.device for t in weights if t.device.type != "meta"), torch.device("cpu"))


class _StandIns(TorchFunctionMode):
    """Replaces meta tensors, and weights that are not on the device, by fake ones that are.

    (Constants that a layer closes over stay where they are, as they will when the model runs.)
    """

    def __init__(
        self, mode: FakeTensorMode, device: torch.device, weights: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self._mode, self._device = mode, device
        self._moved = {id(t): t for t in weights if t.device != device}
        self._made: dict[int, Tensor] = {}
        self._real: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self.replacement, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def replacement(self, tensor: Tensor) -> Tensor:
        """What stands in for `tensor`, or itself."""
        with torch._C.DisableTorchFunction():
            if isinstance(tensor, FakeTensor):
                return tensor
            if id(tensor) not in self._moved and tensor.device.type != "meta":
                return tensor
            if id(tensor) not in self._made:
                made = self._make(tensor)
                self._made[id(tensor)], self._real[id(made)] = made, tensor
        return self._made[id(tensor)]

    def _make(self, tensor: Tensor) -> Tensor:
        with self._mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
            )
        return made.requires_grad_(tensor.requires_grad)

    def original(self, tensor: Tensor) -> Tensor:
        """The tensor that `tensor` stands in for, or itself."""
        return self._real.get(id(tensor), tensor)


class _DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices ops that take numbers from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            schema = func._schema.arguments
            given = {a.name: a.default_value for a in schema if a.has_default_value()}
            given |= dict(zip((a.name for a in schema), args, strict=False)) | kwargs
            # Attention kernels carry the tag for a dropout that is mostly off.
            off = given.get("dropout_p", given.get("p")) == 0.0
            self.seen |= not off and given.get("generator") is None
        return func(*args, **kwargs)


def _leaves(outputs: Any) -> tuple[Tensor, ...]:
    """Leaf tensors whose gradient flows out of `outputs`."""
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    waiting = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return tuple(found)

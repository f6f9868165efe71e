"""What the engine runs: layers, losses and the estimate as callables over numbered values.

The names are gone and aliases are resolved, so the runtime needs no model description: it calls
``layer.fn(*[values[v] for v in layer.reads])`` and keeps the outputs that `writes` lists.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLayer:
    """One layer. `fn` returns a tensor or a tuple; `writes` pairs output position with value.

    An output that `writes` leaves out is an alias: the same tensor as a value that exists already.
    `random` says that the layer draws random numbers in training.
    """

    name: str
    fn: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    parameters: tuple[nn.Parameter, ...]
    modules: tuple[nn.Module, ...]
    random: bool

    def run(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Call the layer on `values` and return what it adds to them."""
        outputs = self.fn(*[values[v] for v in self.reads])
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return {value: outputs[position] for position, value in self.writes}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLoss:
    """``fn(*reads)`` is one value per sample, shape ``[batch]``."""

    fn: Callable[..., Tensor]
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundFeedback:
    """``fn(*reads)`` is the estimate that the backbone reads as value `writes`."""

    backbone: str
    fn: Callable[..., Tensor]
    reads: tuple[int, ...]
    writes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A whole model: layers by component, losses by backbone, batch fields by name.

    `draw_key` is the value of the engine's own batch field, None when no layer reads it.
    """

    layers: Mapping[str, tuple[BoundLayer, ...]]
    losses: Mapping[str, BoundLoss]
    feedback: BoundFeedback | None
    inputs: Mapping[str, int]
    draw_key: int | None

    def value_id(self, name: str) -> int:
        """Value of a batch field.

        Raises:
            SpecError: The model declares no such field.
        """
        if name not in self.inputs:
            raise SpecError(
                f"{name!r} is not a batch field of the model, which declares: "
                f"{', '.join(self.inputs)}"
            )
        return self.inputs[name]

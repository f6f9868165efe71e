"""What a model looks like to planning and lowering: layers over values, without any tensor.

A *value* is one tensor per writer. Two names for one tensor (``h`` just pushed as a skip) are one
value; one name written twice is two. Indices are positions in `ModelGraph.values`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_dpipe.core.errors import SpecError

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class ComponentKind(str, Enum):
    """Frozen components run ahead, for the next batch; backbones are trained."""

    FROZEN = "frozen"
    BACKBONE = "backbone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor ``[batch, *shape]``; `requires_grad` marks graph state (a gradient returns)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES or any(extent < 0 for extent in self.shape):
            raise SpecError(
                f"value {self.name!r} is {self.dtype} {list(self.shape)}; expected extents of at "
                f"least 0 and one of {', '.join(DTYPE_BYTES)}"
            )

    @property
    def bytes_per_sample(self) -> int:
        """Size of one sample's slice."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNode:
    """One layer: which values it reads and writes (indices), and what it owns.

    `trained`: has weights that get a gradient. `passes_grad`: its backward runs at all (it is
    trained, or reads graph state). `random`: draws random numbers in training (dropout).
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    trained: bool
    passes_grad: bool
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentGraph:
    """A chain of layers: a frozen component or a backbone."""

    name: str
    kind: ComponentKind
    layers: tuple[LayerNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNode:
    """Per-sample loss, computed by the stage that holds the backbone's last layer."""

    backbone: str
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackNode:
    """Self-conditioning: the last stage turns `reads` into value `writes`, read again by F ops."""

    backbone: str
    reads: tuple[int, ...]
    writes: int


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """The whole model: values, batch fields (`inputs`), components in run order, losses."""

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    components: tuple[ComponentGraph, ...]
    losses: tuple[LossNode, ...]
    feedback: FeedbackNode | None = None

    def __post_init__(self) -> None:
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            raise SpecError(f"components {', '.join(names)}: two have one name; give each its own")
        there: set[int] = set()
        self._add(there, "the batch", self.inputs)
        if self.feedback is not None:
            self._add(there, "the estimate", (self.feedback.writes,))
        for component in self.components:
            for layer in component.layers:
                where = f"layer {layer.name!r} of {component.name!r}"
                _check_there(there, where, layer.reads)
                self._add(there, where, layer.writes)
        trained = {c.name for c in self.backbones}
        for node in (*self.losses, *((self.feedback,) if self.feedback else ())):
            if node.backbone not in trained:
                raise SpecError(
                    f"a loss or estimate is of {node.backbone!r}; the backbones are "
                    f"{', '.join(sorted(trained)) or 'none'}"
                )
            _check_there(there, f"a loss or estimate of {node.backbone!r}", node.reads)

    def _add(self, there: set[int], where: str, values: Sequence[int]) -> None:
        for value in values:
            if not 0 <= value < len(self.values) or value in there:
                raise SpecError(
                    f"{where} makes value {value}; the model has values 0..{len(self.values) - 1}, "
                    "and each is made once"
                )
            there.add(value)

    def component(self, name: str) -> ComponentGraph:
        """Find a component.

        Raises:
            SpecError: There is none of that name.
        """
        for component in self.components:
            if component.name == name:
                return component
        known = ", ".join(c.name for c in self.components)
        raise SpecError(f"no component {name!r}; the model has: {known}")

    @property
    def frozen(self) -> tuple[ComponentGraph, ...]:
        """The frozen components, in an order in which each one's inputs exist."""
        return tuple(c for c in self.components if c.kind is ComponentKind.FROZEN)

    @property
    def backbones(self) -> tuple[ComponentGraph, ...]:
        """The trained components."""
        return tuple(c for c in self.components if c.kind is ComponentKind.BACKBONE)

    @cached_property
    def writers(self) -> Mapping[int, tuple[str, int]]:
        """Value -> (component, layer) that writes it; inputs and feedback are absent."""
        return {
            value: (component.name, index)
            for component in self.components
            for index, layer in enumerate(component.layers)
            for value in layer.writes
        }

    @cached_property
    def graph_state(self) -> frozenset[int]:
        """Values written by a backbone layer: what travels between stages of one micro-batch."""
        names = {c.name for c in self.backbones}
        return frozenset(v for v, (component, _) in self.writers.items() if component in names)

    @cached_property
    def frozen_fields(self) -> tuple[int, ...]:
        """Batch fields that frozen layers read: what a device needs to encode another's samples."""
        read = {v for c in self.frozen for layer in c.layers for v in layer.reads}
        return tuple(v for v in self.inputs if v in read)

    @cached_property
    def side_inputs(self) -> tuple[int, ...]:
        """Values from outside the backbones that a backbone, loss or estimate reads.

        They carry no gradient; the rank that encoded them delivers them to the stages that read.
        The feedback value is not one of them: the last stage makes it.
        """
        read = {v for c in self.backbones for layer in c.layers for v in layer.reads}
        read |= {v for loss in self.losses for v in loss.reads}
        skip = set(self.graph_state)
        if self.feedback is not None:
            read |= set(self.feedback.reads)
            skip.add(self.feedback.writes)
        return tuple(sorted(read - skip))


def _check_there(there: set[int], where: str, values: Sequence[int]) -> None:
    missing = [value for value in values if value not in there]
    if missing:
        raise SpecError(f"{where} reads value {missing[0]}, which nothing before it makes")

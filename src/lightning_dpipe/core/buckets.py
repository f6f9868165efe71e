"""Shape classes of a batch (aspect-ratio buckets): one model, other per-sample shapes of values.

Every class has a ModelGraph of its own. Layers, values, reads and writes are the same in all of
them, so one cut, one binding and one set of channels serve every class; only shapes differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_dpipe.core.errors import DataError, SpecError
from lightning_dpipe.core.graph import ModelGraph

BASE = "base"
"""The class that a model's own inputs declare; a plan's cut and its own fills are made for it."""


def check_alike(base: ModelGraph, other: ModelGraph, bucket: str) -> None:
    """Refuse a class whose graph differs from the base's in more than shapes.

    Raises:
        SpecError: The first difference is named.
    """

    def refuse(what: str, here: object, there: object) -> None:
        if here != there:
            raise SpecError(
                f"shape class {bucket!r} changes {what}: {there} instead of {here} in {BASE!r}; "
                "classes may differ in shapes only, so that one cut serves all: make the layers "
                "do the same work whatever the shape is"
            )

    refuse("the number of values", len(base.values), len(other.values))
    for here, there in zip(base.components, other.components, strict=True):
        for layer, twin in zip(here.layers, there.layers, strict=True):
            what = f"what layer {here.name}.{layer.name} reads, writes or trains"
            refuse(what, layer, twin)
    for here_value, there_value in zip(base.values, other.values, strict=True):
        there_value = replace(there_value, shape=here_value.shape)
        refuse(f"value {here_value.name!r}", here_value, there_value)
    same = replace(other, values=base.values)
    refuse("inputs, loss or estimate", base, same)


def pair_graph(this: ModelGraph, following: ModelGraph) -> ModelGraph:
    """What one steady step works on: graph state of `this` class, encodings of the `following`."""
    kept = set(this.graph_state)
    if this.feedback is not None:
        kept.add(this.feedback.writes)
    values = (this if i in kept else following for i in range(len(this.values)))
    return replace(this, values=tuple(g.values[i] for i, g in enumerate(values)))


def agreed_bucket(names: Sequence[str], ranks: Mapping[int, str]) -> str:
    """The one class of a step's batches, `ranks` being each rank's.

    Raises:
        DataError: The ranks have different classes; it says which rank has which.
    """
    found = set(ranks.values())
    if len(found) != 1:
        by_class = [
            f"{name!r} on ranks {[r for r, n in ranks.items() if n == name]}"
            for name in names
            if name in found
        ]
        raise DataError(
            f"the ranks' batches are of different shape classes: {', '.join(by_class)}; every "
            "rank needs the same class in a step: draw batches with data.buckets.BucketBatchSampler"
        )
    return found.pop()

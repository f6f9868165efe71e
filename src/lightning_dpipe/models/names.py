"""Which tensor a name means: scopes of names, and the order in which frozen components run.

A component sees its own writes first (the last one wins) and then what comes from outside: batch
fields and the final writes of frozen components. Its inner names are its own, so two encoders may
both call their hidden state ``h``; only a name that *another* component reads must be unambiguous.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Backbone,
    Component,
    FrozenComponent,
    Layer,
    PipelineSpec,
)

BATCH = "the batch"
FEEDBACK = "the self-conditioning estimate"


def check_names(spec: PipelineSpec) -> None:
    """Refuse empty components and names that occur twice where they must not.

    Raises:
        SpecError: As above, or there is no backbone.
    """
    if not spec.backbones:
        raise SpecError("the spec has no backbone; give at least one Backbone to train")
    if DRAW_KEY in spec.inputs:
        raise SpecError(f"input {DRAW_KEY!r} is added by the engine; leave it out of `inputs`")
    _refuse_twice("the spec", "component", [BATCH, FEEDBACK, *(c.name for c in spec.components)])
    for component in spec.components:
        if not component.layers:
            raise SpecError(f"component {component.name!r} has no layers; leave it out")
        _refuse_twice(component.name, "layer", [layer.name for layer in component.layers])
        for layer in component.layers:
            _refuse_twice(f"{component.name}.{layer.name}", "written tensor", layer.writes)


def _refuse_twice(where: str, what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{where} has two {what}s named {name!r}; rename one")
        seen.add(name)


def check_outside(layers: Sequence[Layer], names: Sequence[str]) -> None:
    """Refuse names from outside that an adapter's `layers` write themselves.

    Raises:
        SpecError: Reading such a name would get the layers' own tensor.
    """
    inner = {name for layer in layers for name in layer.writes}
    for name in names:
        if name in inner:
            raise SpecError(
                f"{name!r} is a name that the layers use among themselves; choose another one "
                f"(theirs: {', '.join(sorted(inner))})"
            )


@dataclass(frozen=True, slots=True)
class OutsideRead:
    """A name that a component reads before it writes it itself, and the first layer to do so.

    `own` are the names the component has written by then.
    """

    name: str
    layer: str
    own: frozenset[str]


def outside_reads(component: Component) -> tuple[OutsideRead, ...]:
    """What a component needs from outside, each name once, in the order of reading."""
    written: set[str] = set()
    found: dict[str, OutsideRead] = {}
    for layer in component.layers:
        for name in layer.reads:
            if name not in written:
                found.setdefault(name, OutsideRead(name, layer.name, frozenset(written)))
        written.update(layer.writes)
    return tuple(found.values())


def reads_from_outside(spec: PipelineSpec, name: str) -> bool:
    """Whether any layer, loss or estimate of the model takes `name` from outside."""
    reads = {read.name for c in spec.components for read in outside_reads(c)}
    reads |= {n for loss in spec.losses().values() for n in loss.reads}
    if spec.self_conditioning is not None:
        reads |= set(spec.self_conditioning.reads)
    return name in reads


def source(
    spec: PipelineSpec,
    component: Component,
    name: str,
    *,
    where: str,
    own: Iterable[str],
) -> str:
    """Where `component` gets `name` from: `BATCH`, `FEEDBACK`, or the name of a frozen component.

    `where` names the reader in errors, `own` are the names it could also have read.

    Raises:
        SpecError: Nothing writes the name, or several do.
    """
    found = [place for place, names in _outside(spec, component).items() if name in names]
    if not found:
        raise _unwritten(spec, component, name, where=where, own=own)
    if len(found) > 1:
        raise SpecError(
            f"{where} reads {name!r}, which comes from {' and from '.join(found)}; "
            "rename one of them"
        )
    return found[0]


def frozen_order(spec: PipelineSpec) -> tuple[FrozenComponent, ...]:
    """The frozen components in an order in which what each one reads exists already.

    Ties keep the order of the spec.

    Raises:
        SpecError: A name is unwritten or ambiguous, or components wait for each other.
    """
    needs: dict[str, dict[str, OutsideRead]] = {}
    for component in spec.frozen:
        needs[component.name] = {
            source(
                spec, component, read.name, where=f"{component.name}.{read.layer}", own=read.own
            ): read
            for read in outside_reads(component)
        }
    waiting, done = list(spec.frozen), [BATCH]
    ordered: list[FrozenComponent] = []
    while waiting:
        following = next((c for c in waiting if needs[c.name].keys() <= set(done)), None)
        if following is None:
            names = [c.name for c in waiting]
            place = next(p for p in needs[names[0]] if p not in done)
            raise _cycle(spec, names, needs[names[0]][place], done)
        waiting.remove(following)
        ordered.append(following)
        done.append(following.name)
    return tuple(ordered)


def _outside(spec: PipelineSpec, component: Component) -> dict[str, tuple[str, ...]]:
    """Names that `component` can take from outside, by place."""
    places: dict[str, tuple[str, ...]] = {BATCH: (*spec.inputs, DRAW_KEY)}
    for other in spec.frozen:
        if other.name != component.name:
            places[other.name] = tuple(w for layer in other.layers for w in layer.writes)
    if isinstance(component, Backbone) and spec.self_conditioning is not None:
        places[FEEDBACK] = (spec.self_conditioning.writes,)
    return places


def _unwritten(
    spec: PipelineSpec,
    component: Component,
    name: str,
    *,
    where: str,
    own: Iterable[str],
) -> SpecError:
    known = {*own, *(n for names in _outside(spec, component).values() for n in names)}
    return SpecError(
        f"{where} reads {name!r}, which nothing before it writes; "
        f"available there: {', '.join(sorted(known))}"
    )


def _cycle(
    spec: PipelineSpec, waiting: Sequence[str], read: OutsideRead, done: Sequence[str]
) -> SpecError:
    written = (w for c in spec.frozen if c.name in done for layer in c.layers for w in layer.writes)
    return SpecError(
        f"{waiting[0]}.{read.layer} reads {read.name!r}, but the frozen components "
        f"{', '.join(waiting)} wait for each other; available there: "
        f"{', '.join(sorted({*read.own, *spec.inputs, *written}))}; break the cycle"
    )

"""Which encodings may be kept from epoch to epoch: found in the graph, not in names.

In:     the model's graph, the value that keys all random draws, and which layers own weights.
Out:    what is kept, what it depends on, and the graph of a step in which all of it is at hand.

A frozen layer is *fixed* if what it writes follows from the sample alone: it reads no draw key, nor
anything drawn. The last fixed values are kept: a VAE's moments, not the latent drawn from them. An
integer that a frozen layer draws from integers is a *choice*: a caption or the empty one. There are
few of them and they cost nothing to draw again, so what is fixed by a choice is kept too, for each
outcome by itself. Noise and what reads it is neither, e.g. ControlNet's locked encoder.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_dpipe.core.graph import LayerNode, ModelGraph

Place = tuple[str, int]
"""A layer: its component and index."""

_INTEGERS = ("int", "uint", "bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """Values that depend on the same `sources` (batch fields and choices), kept together.

    `layers` make them, in run order.
    """

    sources: tuple[int, ...]
    kept: tuple[int, ...]
    layers: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class CacheCut:
    """What is kept of a `model`, and what that saves.

    `choices` are the layers, in run order, that draw the choices among the sources.
    """

    model: ModelGraph
    groups: tuple[KeptGroup, ...]
    choices: tuple[Place, ...]

    @property
    def kept(self) -> tuple[int, ...]:
        """All kept values."""
        return tuple(v for group in self.groups for v in group.kept)

    @property
    def sources(self) -> frozenset[int]:
        """All values that name an entry."""
        return frozenset(v for group in self.groups for v in group.sources)

    @cached_property
    def idle(self) -> frozenset[Place]:
        """The layers that need not run when everything kept is at hand."""
        needed, idle = set(self.model.side_inputs) - set(self.kept), set[Place]()
        for place, layer in reversed(tuple(_frozen(self.model))):
            if needed.isdisjoint(layer.writes):
                idle.add(place)
            else:
                needed |= set(layer.reads) - set(self.kept)
        return frozenset(idle)

    def only(self, groups: Collection[int]) -> "CacheCut":
        """The same with some of the groups, by number."""
        return replace(self, groups=tuple(g for i, g in enumerate(self.groups) if i in groups))

    def graph(self, graph: ModelGraph) -> ModelGraph:
        """The model when everything kept is at hand: kept values are batch fields.

        Idle layers stay, so that the others keep their numbers, but read and write nothing.
        `graph` is the model or another shape class of it.
        """

        def left(place: Place, layer: LayerNode) -> LayerNode:
            return replace(layer, reads=(), writes=()) if place in self.idle else layer

        components = tuple(
            replace(c, layers=tuple(left((c.name, i), x) for i, x in enumerate(c.layers)))
            for c in graph.components
        )
        return replace(graph, inputs=(*graph.inputs, *self.kept), components=components)


def cache_cut(graph: ModelGraph, *, draw_key: int | None, weighted: frozenset[Place]) -> CacheCut:
    """Find what may be kept. Only what some layer with weights took part in is worth it.

    Args:
        graph: The model.
        draw_key: The batch field that keys draws; None: nothing is drawn.
        weighted: Frozen layers that own weights.
    """
    fields = frozenset(graph.inputs) - {draw_key}
    sources = {v: frozenset((v,)) for v in fields}
    makers: dict[int, tuple[Place, ...]] = dict.fromkeys(fields, ())
    chosen: dict[int, Place] = {}
    for place, layer in _frozen(graph):
        if all(v in sources for v in layer.reads):
            found = frozenset[int]().union(*(sources[v] for v in layer.reads))
            made = dict.fromkeys(p for v in layer.reads for p in makers[v])
            for value in layer.writes:
                sources[value], makers[value] = found, (*made, place)
        elif _chooses(graph, layer, fields | {draw_key} | chosen.keys()):
            for value in layer.writes:
                sources[value], makers[value] = frozenset((value,)), ()
                chosen[value] = place
    fixed = {place for made in makers.values() for place in made}
    wanted = set(graph.side_inputs)
    wanted |= {v for place, layer in _frozen(graph) if place not in fixed for v in layer.reads}
    kept = [v for v in sorted(wanted) if weighted.intersection(makers.get(v, ()))]
    order = {place: n for n, (place, _) in enumerate(_frozen(graph))}
    groups = tuple(
        KeptGroup(
            sources=tuple(sorted(found)),
            kept=tuple(v for v in kept if sources[v] == found),
            layers=tuple(
                sorted({p for v in kept if sources[v] == found for p in makers[v]}, key=order.get)  # type: ignore[arg-type]
            ),
        )
        for found in dict.fromkeys(sources[v] for v in kept)
    )
    draws = {v: p for v, p in chosen.items() if any(v in g.sources for g in groups)}
    return CacheCut(model=graph, groups=groups, choices=_with_their_own(graph, draws, chosen))


def _frozen(graph: ModelGraph) -> Iterator[tuple[Place, LayerNode]]:
    for component in graph.frozen:
        for index, layer in enumerate(component.layers):
            yield (component.name, index), layer


def _chooses(graph: ModelGraph, layer: LayerNode, known: "frozenset[int | None]") -> bool:
    """Whether a layer draws integers from integers."""
    return all(
        value in known and graph.values[value].dtype.startswith(_INTEGERS) for value in layer.reads
    ) and all(graph.values[value].dtype.startswith(_INTEGERS) for value in layer.writes)


def _with_their_own(
    graph: ModelGraph, wanted: dict[int, Place], chosen: dict[int, Place]
) -> tuple[Place, ...]:
    """The layers that draw the wanted choices, and those whose choices they read, in run order."""
    needed = set(wanted.values())
    for place, layer in reversed(tuple(_frozen(graph))):
        if place in needed:
            needed |= {chosen[v] for v in layer.reads if v in chosen}
    return tuple(place for place, _ in _frozen(graph) if place in needed)

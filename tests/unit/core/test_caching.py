"""What may be kept: against a symbolic run of random frozen graphs, and on the families we ship."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.caching import CacheCut, cache_cut
from lightning_dpipe.core.graph import ComponentGraph, ComponentKind, LayerNode, ModelGraph, Value

KEY = 0
"""Draw key, the first batch field of every graph here."""


def graph_of(
    frozen: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]],
    reads: tuple[int, ...],
    dtypes: dict[int, str],
    fields: int,
) -> ModelGraph:
    """Fields are values 0, 1, ...; the backbone reads `reads` and writes the last value."""
    layers = [w for chain in frozen.values() for _, writes in chain for w in writes]
    last = max([fields - 1, *layers]) + 1

    def node(index: int, reads: tuple[int, ...], writes: tuple[int, ...], trained: bool = False):
        return LayerNode(
            name=str(index), reads=reads, writes=writes, trained=trained, passes_grad=trained
        )

    components = [
        ComponentGraph(
            name=name,
            kind=ComponentKind.FROZEN,
            layers=tuple(node(i, *layer) for i, layer in enumerate(chain)),
        )
        for name, chain in frozen.items()
    ]
    backbone = ComponentGraph(
        name="net", kind=ComponentKind.BACKBONE, layers=(node(0, reads, (last,), True),)
    )
    return ModelGraph(
        values=tuple(
            Value(name=f"v{i}", shape=(2,), dtype=dtypes.get(i, "float32"), requires_grad=i == last)
            for i in range(last + 1)
        ),
        inputs=tuple(range(fields)),
        components=(*components, backbone),
        losses=(),
    )


def places(graph: ModelGraph) -> frozenset[tuple[str, int]]:
    return frozenset((c.name, i) for c in graph.frozen for i in range(len(c.layers)))


def cut_of(graph: ModelGraph) -> CacheCut:
    return cache_cut(graph, draw_key=KEY, weighted=places(graph))


INT = "int64"


def test_moments_are_kept_and_the_latent_drawn_from_them_is_not() -> None:
    # image 1 -> 2 -> moments 3; (3, key) -> latent 4; (4, key) -> noisy 5
    graph = graph_of(
        {"vae": [((1,), (2,)), ((2,), (3,)), ((3, KEY), (4,))], "noise": [((4, KEY), (5,))]},
        reads=(5,), dtypes={KEY: INT}, fields=2,
    )  # fmt: skip
    cut = cut_of(graph)
    (group,) = cut.groups
    assert (group.sources, group.kept) == ((1,), (3,))
    assert group.layers == (("vae", 0), ("vae", 1))
    assert cut.idle == {("vae", 0), ("vae", 1)}
    variant = cut.graph(graph)
    assert variant.inputs == (0, 1, 3)
    assert [bool(x.reads or x.writes) for x in variant.component("vae").layers] == [0, 0, 1]
    assert variant.side_inputs == graph.side_inputs


def test_what_is_encoded_from_a_dropped_caption_is_kept_by_the_caption_that_was_encoded() -> None:
    # ids 1; drop (1, key) -> 2 integer; text 2 -> 3
    graph = graph_of(
        {"drop": [((1, KEY), (2,))], "text": [((2,), (3,))]},
        reads=(3,), dtypes={KEY: INT, 1: INT, 2: INT}, fields=2,
    )  # fmt: skip
    cut = cut_of(graph)
    (group,) = cut.groups
    assert (group.sources, group.kept) == ((2,), (3,))
    assert cut.choices == (("drop", 0),)
    assert cut.idle == {("drop", 0), ("text", 0)}  # nobody else reads the caption


def test_a_choice_that_others_read_too_is_still_drawn() -> None:
    graph = graph_of(
        {"drop": [((1, KEY), (2,))], "text": [((2,), (3,))]},
        reads=(2, 3), dtypes={KEY: INT, 1: INT, 2: INT}, fields=2,
    )  # fmt: skip
    assert cut_of(graph).idle == {("text", 0)}


def test_work_on_noisy_latents_is_not_kept() -> None:
    graph = graph_of(
        {"noise": [((1, KEY), (2,))], "locked": [((2,), (3,)), ((3,), (4,))]},
        reads=(4,), dtypes={KEY: INT}, fields=2,
    )  # fmt: skip
    cut = cut_of(graph)
    assert not cut.kept
    assert not cut.idle


def test_a_component_without_weights_is_not_worth_a_file() -> None:
    graph = graph_of({"shuffle": [((1,), (2,))]}, reads=(2,), dtypes={KEY: INT}, fields=2)
    assert cut_of(graph).kept == (2,)
    assert not cache_cut(graph, draw_key=KEY, weighted=frozenset()).kept


def test_each_field_has_a_group_of_its_own() -> None:
    graph = graph_of(
        {"vae": [((1,), (3,))], "text": [((2,), (4,))], "both": [((3, 4), (5,)), ((5, KEY), (6,))]},
        reads=(3, 4, 6), dtypes={KEY: INT, 2: INT}, fields=3,
    )  # fmt: skip
    found = {group.sources: group.kept for group in cut_of(graph).groups}
    assert found == {(1,): (3,), (2,): (4,), (1, 2): (5,)}


@st.composite
def graphs(draw: st.DrawFn) -> tuple[ModelGraph, frozenset[tuple[str, int]]]:
    """Random components over random fields; some layers write integers, some have no weights."""
    fields = draw(st.integers(1, 4))
    known, dtypes = list(range(fields)), {KEY: INT}
    dtypes |= {v: INT for v in known[1:] if draw(st.booleans())}
    frozen: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for c in range(draw(st.integers(1, 4))):
        chain = frozen.setdefault(f"c{c}", [])
        for _ in range(draw(st.integers(1, 3))):
            reads = tuple(
                draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
            )
            writes = tuple(range(len(known), len(known) + draw(st.integers(1, 2))))
            dtypes |= {v: INT for v in writes if draw(st.booleans())}
            chain.append((reads, writes))
            known += writes
    read = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True)))
    graph = graph_of(frozen, reads=read, dtypes=dtypes, fields=fields)
    bare = frozenset(p for p in sorted(places(graph)) if draw(st.booleans()))
    return graph, places(graph) - bare


def symbolic(graph: ModelGraph, given: dict[int, str]) -> dict[int, str]:
    """Each value as the expression that makes it: two are equal exactly if they must be."""
    values = dict(given)
    for component in graph.frozen:
        for i, layer in enumerate(component.layers):
            if not (layer.reads or layer.writes):
                continue
            read = ",".join(values[v] for v in layer.reads)
            for n, v in enumerate(layer.writes):
                values[v] = f"{component.name}{i}.{n}({read})"
    return values


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
@given(graphs())
def test_kept_values_follow_from_their_sources_and_replace_the_idle_layers(made) -> None:
    graph, weighted = made
    cut = cache_cut(graph, draw_key=KEY, weighted=weighted)
    runs = []
    for key in ("k1", "k2"):
        fields = {v: f"f{v}" for v in graph.inputs} | {KEY: key}
        runs.append(symbolic(graph, fields))
        # With the kept values at hand and the idle layers left out, the backbones read the same.
        # That holds for any of the groups alone, too.
        for left in (range(len(cut.groups)), range(0, len(cut.groups), 2), range(1, 9, 2)):
            some = cut.only(left)
            again = symbolic(some.graph(graph), fields | {v: runs[-1][v] for v in some.kept})
            for v in graph.side_inputs:
                assert again[v] == runs[-1][v]
    one, other = runs
    choices = {v for p in cut.choices for v in graph.component(p[0]).layers[p[1]].writes}
    for group in cut.groups:
        assert set(group.sources) <= (set(graph.inputs) - {KEY}) | choices
        # The choices' expressions named alike: then nothing kept differs between two draws.
        for v in group.kept:
            texts = []
            for run in runs:
                text = run[v]
                for source in sorted(choices, key=lambda s: -len(run[s])):
                    text = text.replace(run[source], f"<{source}>")
                texts.append(text)
            assert texts[0] == texts[1]
        assert weighted & set(group.layers)
    # Nothing is missed: what no draw touches, some weights took part in, and a backbone reads.
    for v in set(graph.side_inputs) & set(graph.writers):
        if one[v] == other[v] and weighted & makers(graph, v):
            assert v in cut.kept


def makers(graph: ModelGraph, value: int) -> set[tuple[str, int]]:
    """All layers that a value follows from."""
    if value not in graph.writers:
        return set()
    component, index = place = graph.writers[value]
    reads = graph.component(component).layers[index].reads
    return {place}.union(*(makers(graph, v) for v in reads))

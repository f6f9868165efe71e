from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.planning.backlog import Backlog, FrozenCosts, Piece, frozen_layers
from synthetic import FrozenChain, model_profile

FROZEN = (
    FrozenChain(name="text", forward_us=(10, 10, 10)),
    FrozenChain(name="vae", forward_us=(40,)),
    FrozenChain(name="noise", forward_us=(1,), after=("text", "vae")),
)


def work(*frozen: FrozenChain, samples: int = 4, fill_us: int = 0) -> FrozenCosts:
    profile = model_profile([1], frozen=frozen, fill_us=fill_us)
    return FrozenCosts.of(profile, samples=samples)


def test_layers_wait_for_their_chain_and_for_what_they_read_from_other_components() -> None:
    layers = frozen_layers(model_profile([1], frozen=FROZEN).graph)
    assert [(x.component, x.index, x.before) for x in layers] == [
        ("text", 0, ()),
        ("text", 1, (0,)),
        ("text", 2, (1,)),
        ("vae", 0, ()),
        ("noise", 0, (2, 3)),
    ]


def test_a_layer_that_reads_only_batch_fields_still_waits_for_its_chain() -> None:
    graph = model_profile([1], frozen=FROZEN).graph
    text = graph.components[0]
    free = replace(text, layers=(*text.layers[:2], replace(text.layers[2], reads=graph.inputs)))
    layers = frozen_layers(replace(graph, components=(free, *graph.components[1:])))
    assert layers[2].before == (1,)


def test_what_finishes_a_layer_goes_first_largest_first_then_partial_batches() -> None:
    pieces, used_us = Backlog(work(*FROZEN)).pack(225)
    # vae whole 160, text.0 whole 40, then 25 us are left for 2 samples of text.1.
    assert pieces == [Piece(3, 0, 4), Piece(0, 0, 4), Piece(1, 0, 2)]
    assert used_us == 220


def test_without_partial_batches_only_whole_layers_are_taken() -> None:
    pieces, used_us = Backlog(work(*FROZEN), partial=False).pack(225)
    assert pieces == [Piece(3, 0, 4), Piece(0, 0, 4)]
    assert used_us == 200


def test_a_layer_never_runs_ahead_of_the_samples_it_reads() -> None:
    backlog = Backlog(work(FrozenChain(name="text", forward_us=(100, 10)), samples=4))
    pieces, _ = backlog.pack(225)
    assert pieces == [Piece(0, 0, 2), Piece(1, 0, 2)]


def test_starting_a_fill_is_charged_per_fill_and_not_per_layer_of_a_fill() -> None:
    chain = FrozenChain(name="text", forward_us=(10, 10, 10))
    assert Backlog(work(chain, fill_us=7)).pack(127)[1] == 127
    # One microsecond less: the last layer runs on 3 samples at most, as a second fill.
    backlog = Backlog(work(chain, fill_us=7))
    assert backlog.pack(126)[1] == 7 + 80 + 7 + 30
    assert backlog.drain()[1] == 7 + 10


def test_the_samples_of_another_device_are_a_range_of_their_own() -> None:
    chain = FrozenChain(name="text", forward_us=(10, 10))
    backlog = Backlog(work(chain, samples=8, fill_us=5), rows=(5, 8), owner=2)
    assert backlog.pack(35) == ([Piece(0, 5, 8, 2)], 35)
    assert backlog.drain() == ([Piece(1, 5, 8, 2)], 35)
    fills = backlog.work.fills([Piece(0, 5, 8, 2), Piece(1, 5, 8, 2)], 0, None)
    assert [(f.device, f.owner, f.start, f.stop, f.first, f.last) for f in fills] == [
        (0, 2, 0, 2, 5, 8)
    ]
    at_home = Piece(1, 5, 8)
    assert not backlog.work.prolongs(at_home, Piece(0, 5, 8, 2)), "samples of two devices"


@settings(deadline=None, max_examples=100)
@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    samples=st.integers(1, 9),
    budget_us=st.integers(0, 2000),
)
def test_a_bubble_is_full_up_to_one_sample_of_one_layer(
    costs: list[int], samples: int, budget_us: int
) -> None:
    backlog = Backlog(work(FrozenChain(name="text", forward_us=tuple(costs)), samples=samples))
    pieces, used_us = backlog.pack(budget_us)
    assert used_us <= budget_us
    assert used_us == sum(costs[p.layer] * (p.last - p.first) for p in pieces)
    if used_us < samples * sum(costs):
        assert budget_us - used_us < max(costs)


@settings(deadline=None, max_examples=60)
@given(
    budgets=st.lists(st.integers(0, 400), max_size=12),
    fixed_us=st.integers(0, 30),
    fill_us=st.integers(0, 20),
)
def test_budgets_and_the_rest_cover_every_sample_of_every_layer_once(
    budgets: list[int], fixed_us: int, fill_us: int
) -> None:
    frozen = tuple(
        FrozenChain(name=c.name, forward_us=c.forward_us, after=c.after, fixed_us=fixed_us)
        for c in FROZEN
    )
    todo = work(*frozen, fill_us=fill_us)
    backlog = Backlog(todo)
    pieces = [p for budget_us in budgets for p in backlog.pack(budget_us)[0]]
    pieces += backlog.drain()[0]
    reached = [0] * len(todo.layers)
    for piece in pieces:
        assert piece.first == reached[piece.layer] < piece.last
        assert all(reached[p] >= piece.last for p in todo.layers[piece.layer].before)
        reached[piece.layer] = piece.last
    assert reached == [4] * len(todo.layers)


@pytest.mark.parametrize("budget_us", [0, 99, 100, 101, 139, 140, 10_000])
def test_most_samples_is_the_largest_count_that_fits(budget_us: int) -> None:
    todo = work(FrozenChain(name="text", forward_us=(10,), fixed_us=90), samples=9)
    fits = [n for n in range(1, 10) if todo.cost_us(0, n) <= budget_us]
    assert todo.most_samples(0, 9, budget_us) == max(fits, default=0)

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.crossings import crossings
from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Stage
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.partition import partition
from synthetic import model_profile

Cut = tuple[tuple[int, int], ...]


def all_cuts(num_layers: int, num_stages: int) -> list[Cut]:
    return [
        tuple(itertools.pairwise((0, *inner, num_layers)))
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


def cost(profile: Profile, cut: Cut, samples: int) -> tuple[int, int, Cut]:
    """(slowest stage, bytes over borders in both directions, the cut): what is to be smallest."""
    slowest = max(
        profile.forward_us("net", a, b, samples) + profile.backward_us("net", a, b, samples)
        for a, b in cut
    )
    stages = [Stage(backbone="net", start=a, stop=b, devices=(i,)) for i, (a, b) in enumerate(cut)]
    num_bytes = sum(
        2 * len(c.readers) * profile.graph.values[c.value].bytes_per_sample
        for c in crossings(profile.graph, stages)
    )
    return slowest, num_bytes, cut


@pytest.mark.parametrize("num_layers", range(1, 10))
def test_the_cut_is_the_best_of_all_cuts(num_layers: int) -> None:
    rng = random.Random(num_layers)
    for num_stages in range(1, min(4, num_layers) + 1):
        for _ in range(4):
            forward = [rng.randint(0, 6) for _ in range(num_layers)]
            backward = [rng.randint(0, 9) for _ in range(num_layers)]
            pairs = list(itertools.combinations(range(num_layers), 2))
            profile = model_profile(forward, backward, skips=rng.sample(pairs, min(3, len(pairs))))
            best = min(cost(profile, cut, 3) for cut in all_cuts(num_layers, num_stages))
            found = partition(profile, "net", num_stages=num_stages, samples=3)
            assert cost(profile, found, 3) == best


@settings(deadline=None, max_examples=60)
@given(data=st.data(), times=st.lists(st.integers(0, 40), min_size=2, max_size=8))
def test_the_slowest_stage_is_as_fast_as_brute_force_finds(
    data: st.DataObject, times: list[int]
) -> None:
    num_stages = data.draw(st.integers(1, len(times)))
    profile = model_profile(times)
    found = partition(profile, "net", num_stages=num_stages, samples=1)
    best = min(max(3 * sum(times[a:b]) for a, b in cut) for cut in all_cuts(len(times), num_stages))
    assert max(3 * sum(times[a:b]) for a, b in found) == best
    assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, len(times))
    assert all(a < b for a, b in found)


def test_among_equal_cuts_the_one_that_keeps_the_skip_at_home_wins() -> None:
    # Layers 2 and 3 cost nothing: the cut may be before, between or after them.
    plain = model_profile([2, 2, 0, 0, 4])
    assert partition(plain, "net", num_stages=2, samples=1) == ((0, 2), (2, 5))
    skip = model_profile([2, 2, 0, 0, 4], skips=((0, 2),))
    assert partition(skip, "net", num_stages=2, samples=1) == ((0, 3), (3, 5))


def test_more_stages_than_layers_is_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"4 stages cannot be cut from the 3 layers of 'net'"):
        partition(model_profile([1, 1, 1]), "net", num_stages=4, samples=1)
    with pytest.raises(PlanError, match=r"0 stages"):
        partition(model_profile([1, 1, 1]), "net", num_stages=0, samples=1)

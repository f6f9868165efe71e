import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from brute import random_profile
from pair_brute import random_pair

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.directions import Directions, costs_of
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from synthetic import model_profile, pair_profile

CUTTING = Cutting(sizes=split_sizes(16, 3), num_devices=2, num_groups=2, schedule="1f1b")


def directions_of(profile: Profile) -> Directions:
    found = costs_of(profile)
    assert isinstance(found, Directions)
    return found


def test_one_backbone_has_no_directions() -> None:
    profile = random_profile(random.Random(0), 4, frozen=True, feedback=False)
    assert isinstance(costs_of(profile), BackboneCosts)


def test_backbones_alternate_between_down_and_up() -> None:
    found = directions_of(random_pair(random.Random(0), 4, 3, 5, 2))
    assert [c.backbone for c in found.down.costs] == ["net0", "net2"]
    assert [c.backbone for c in found.up.costs] == ["net1", "net3"]
    assert [c.backbone for c in found.backbones] == ["net0", "net1", "net2", "net3"]
    assert found.num_layers == 2


def test_a_lone_backbone_is_cut_at_each_layer_and_costs_what_it_costs_alone() -> None:
    profile = random_pair(random.Random(1), 5, 4, feedback=True)
    down = directions_of(profile).down
    assert down.borders.tolist() == [[i] for i in range(6)]
    conditioned = replace(CUTTING, self_conditioned=True)
    alone = BackboneCosts(profile, "net0").table(conditioned, replicas=2, from_back=1)
    found = down.table(conditioned, replicas=2)
    for name in ("work", "first", "last", "sync", "step"):
        assert np.array_equal(getattr(found, name), getattr(alone, name))


def test_only_the_backbone_that_feeds_back_runs_its_forward_twice() -> None:
    profile = random_pair(random.Random(1), 3, 3, feedback=True)
    found = directions_of(profile)
    for direction, twice in ((found.down, True), (found.up, False)):
        plain = direction.table(CUTTING, replicas=1).work[0, -1]
        conditioned = direction.table(replace(CUTTING, self_conditioned=True), replicas=1)
        name = direction.costs[0].backbone
        forward_us = sum(profile.forward_us(name, 0, 3, n) for n in CUTTING.sizes)
        assert conditioned.work[0, -1] - plain == (forward_us if twice else 0)


@pytest.mark.parametrize("seed", range(5))
def test_backbones_of_a_direction_are_cut_at_like_shares_of_their_work(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_pair(rng, rng.randint(2, 8), 3, rng.randint(2, 8))
    down = directions_of(profile).down
    rows = down.borders.tolist()
    assert rows[0] == [0, 0]
    assert rows[-1] == [c.num_layers for c in down.costs]
    assert all(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a, b in pairwise(rows))
    # Each backbone's every layer is at some border.
    for k, costs in enumerate(down.costs):
        assert {row[k] for row in rows} == set(range(costs.num_layers + 1))
    table = down.table(CUTTING, replicas=1)
    whole = sum(
        profile.forward_us(c.backbone, 0, c.num_layers, n)
        + profile.backward_us(c.backbone, 0, c.num_layers, n)
        for c in down.costs
        for n in CUTTING.sizes
    )
    assert table.work[0, -1] == whole
    empty = [
        (i, j)
        for i in range(len(rows))
        for j in range(len(rows))
        if any(x >= y for x, y in zip(rows[i], rows[j], strict=True))
    ]
    assert all(np.isinf(table.work[i, j]) for i, j in empty)


def test_a_frozen_layer_that_passes_gradients_costs_no_weight_gradient_and_no_reduction() -> None:
    base = model_profile([100, 100, 100])
    cost = base.component("net")
    locked = replace(cost.layers[1], backward_us=cost.layers[1].input_grad_us, trained_bytes=0)
    layers = (cost.layers[0], locked, cost.layers[2])
    profile = pair_profile(
        replace(base, costs=(replace(cost, layers=layers),)), model_profile([100, 100])
    )
    table = directions_of(profile).down.table(CUTTING, replicas=1)
    # Backward is 200 us a sample, half of it the input gradient; 16 samples.
    assert table.work[0, 1] == 16 * (100 + 200)
    assert table.work[1, 2] == 16 * (100 + 100)
    assert table.sync[1, 2] == 0
    assert table.sync[0, 1] > 0


def test_backbones_that_feed_each_other_are_refused_by_name() -> None:
    profile = pair_profile(model_profile([100] * 2), model_profile([100] * 2))
    graph = profile.graph
    first, second = graph.backbones
    reader = replace(second.layers[0], reads=(*second.layers[0].reads, first.layers[1].writes[0]))
    second = replace(second, layers=(reader, *second.layers[1:]))
    fed = replace(profile, graph=replace(graph, components=(first, second)))
    with pytest.raises(UnsupportedError, match=r"'net1' reads .* which backbone 'net0' writes"):
        costs_of(fed)

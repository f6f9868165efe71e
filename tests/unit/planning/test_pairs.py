"""Fills of a step between two shape classes, against the planner on one class."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from bucketed import made_up_profile
from lightning_dpipe.core.op import Op
from lightning_dpipe.planning.pairs import pair_fills, pair_profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_graph

CHAIN = (FrozenChain(name="text", forward_us=(1, 1, 1)),)
PROFILES = {
    width: made_up_profile(model_graph(8, frozen=CHAIN, width=width)) for width in (80, 200, 320)
}
PLAN = make_plan(PROFILES[200], world_size=3, batch_size=4, num_stages=3, num_microbatches=4)


def test_a_class_with_itself_has_the_planners_own_fills() -> None:
    assert pair_fills(PLAN, PROFILES[200], PROFILES[200]) == PLAN.fills
    assert pair_profile(PROFILES[80], PROFILES[80]) == PROFILES[80]


@pytest.mark.parametrize(("this", "following"), list(product(PROFILES, repeat=2)))
def test_every_pair_encodes_every_sample_of_every_layer_once(this: int, following: int) -> None:
    done = Counter(
        (f.home, f.component, layer, sample)
        for f in pair_fills(PLAN, PROFILES[this], PROFILES[following])
        for layer in range(f.start, f.stop)
        for sample in range(f.first, f.last)
    )
    assert set(done.values()) == {1}
    assert len(done) == 3 * 3 * 4
    ops = {op for order in schedule_of(PLAN).orders for op in order}
    for fill in pair_fills(PLAN, PROFILES[this], PROFILES[following]):
        assert fill.after is None or (isinstance(fill.after, Op) and fill.after in ops)


def test_a_pair_costs_this_classs_ops_and_the_next_ones_frozen_work() -> None:
    small, large = PROFILES[80], PROFILES[320]
    mixed = pair_profile(small, large)
    assert mixed.forward_us("net", 0, 8, 4) == small.forward_us("net", 0, 8, 4)
    assert mixed.backward_us("net", 0, 8, 4) == small.backward_us("net", 0, 8, 4)
    assert mixed.forward_us("text", 0, 3, 4) == large.forward_us("text", 0, 3, 4)


def test_fills_made_for_the_pair_are_no_slower_than_the_plans_own() -> None:
    for this, following in product(PROFILES, repeat=2):
        profile = pair_profile(PROFILES[this], PROFILES[following])
        ends = [
            simulate(replace(PLAN, fills=fills), schedule_of(PLAN), profile).end_us
            for fills in (pair_fills(PLAN, PROFILES[this], PROFILES[following]), PLAN.fills)
        ]
        assert ends[0] <= ends[1] * 1.002

"""Fills by pair of classes: made once, compared over ranks at first use."""

from typing import Any

import pytest

from bucketed import made_up_profile
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.pair_fills import PairFills
from synthetic import FrozenChain, model_graph

CHAIN = (FrozenChain(name="text", forward_us=(1, 1, 1)),)
PROFILES = {
    name: made_up_profile(model_graph(8, frozen=CHAIN, width=width))
    for name, width in ((BASE, 200), ("wide", 320))
}
PLAN = make_plan(PROFILES[BASE], world_size=3, batch_size=4, num_stages=3, num_microbatches=4)


class Link(HostLink):
    """Another rank beside this one, with the digest `other`, or this rank's own."""

    def __init__(self, other: str | None = None) -> None:
        super().__init__()
        self.other, self.asked = other, 0

    def gather_objects(self, value: Any) -> list[Any]:
        self.asked += 1
        return [value, value if self.other is None else self.other]


def test_each_pair_is_made_and_compared_once() -> None:
    link = Link()
    fills = PairFills(PLAN, PROFILES, link)
    assert fills(BASE, BASE) is PLAN.fills
    assert link.asked == 0
    first = fills("wide", BASE)
    assert fills("wide", BASE) is first
    assert link.asked == 1
    assert {f.device for f in first} == {0, 1, 2}


def test_ranks_that_made_other_fills_are_refused() -> None:
    with pytest.raises(DPipeError, match="the fills of base before wide of rank 1 is other"):
        PairFills(PLAN, PROFILES, Link("other"))(BASE, "wide")

"""Fills of a step: the plan's, cut to the batch that comes."""

from dataclasses import replace
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.fills import encoders, fill_slots
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from synthetic import FrozenChain, model_profile

PROFILE = model_profile((100, 120, 90, 110), frozen=(FrozenChain(name="text", forward_us=(9, 9)),))
PLAN: Plan = make_plan(PROFILE, world_size=2, batch_size=8, num_microbatches=4)


def covered(sizes: tuple[int, int], plan: Plan = PLAN) -> list[set[tuple[int, int]]]:
    """(layer, sample) pairs that each device encodes, each at most once."""
    shape = StepShape(sizes=(8, 8), next_sizes=sizes, encoded=True)
    orders = schedule_of(plan).orders
    found: list[set[tuple[int, int]]] = [set(), set()]
    for (device, _), fills in fill_slots(PLAN, PROFILE.graph, orders, shape).items():
        for f in fills:
            for pair in ((x, i) for x in range(f.start, f.stop) for i in range(f.first, f.last)):
                assert pair not in found[device]
                found[device].add(pair)
    return found


def everything(sizes: tuple[int, int]) -> list[set[tuple[int, int]]]:
    return [{(layer, i) for layer in range(2) for i in range(n)} for n in sizes]


def test_all_work_of_the_next_batch_is_done_once_whatever_its_size() -> None:
    for sizes in ((8, 8), (3, 8), (0, 1), (11, 8)):
        assert covered(sizes) == everything(sizes)


def test_a_schedule_without_a_fill_s_op_still_does_its_work() -> None:
    short = replace(PLAN, num_microbatches=1)
    assert covered((8, 8), short) == everything((8, 8))


def test_nothing_is_filled_when_no_batch_follows() -> None:
    shape = StepShape(sizes=(8, 8), next_sizes=None, encoded=True)
    assert not fill_slots(PLAN, PROFILE.graph, schedule_of(PLAN).orders, shape)


@given(data=st.data())
def test_every_sample_has_one_encoder_at_every_batch_size(data: st.DataObject) -> None:
    """Runs against a table of who encodes which sample of a plan at random, cut or topped up."""
    who = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=3,
                             max_size=3))  # fmt: skip
    fills = tuple(
        Fill(device=d, after=None, component="text", start=0, stop=2, first=i, last=i + 1,
             owner=None if d == owner else owner)
        for owner, row in enumerate(who) for i, d in enumerate(row)
    )  # fmt: skip
    fills = tuple(sorted(fills, key=lambda f: f.device))
    plan = make_plan(PROFILE, world_size=3, batch_size=6, num_microbatches=3, fill=False)
    plan = replace(plan, fills=fills)
    sizes = tuple(data.draw(st.lists(st.integers(0, 8), min_size=3, max_size=3)))
    shape = StepShape(sizes=(6, 6, 6), next_sizes=sizes, encoded=True)
    slots = fill_slots(plan, PROFILE.graph, schedule_of(plan).orders, shape)
    runs = encoders(chain.from_iterable(slots.values()), sizes)
    table = [[row[i] if i < 6 else owner for i in range(size)]
             for (owner, row), size in zip(enumerate(who), sizes, strict=True)]  # fmt: skip
    found: list[list[int]] = [[] for _ in sizes]
    for run in runs:
        assert run.first == len(found[run.owner]), "runs follow each other"
        found[run.owner] += [run.device] * (run.last - run.first)
    assert found == table
    assert all(a.device != b.device for a, b in pairwise(runs) if a.owner == b.owner)

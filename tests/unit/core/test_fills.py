"""Fills of a step: the plan's, cut to the batch that comes."""

from dataclasses import replace

from lightning_dpipe.core.fills import fill_slots
from lightning_dpipe.core.plan import Plan
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

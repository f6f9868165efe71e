"""Orders of several chains against brute force, closed forms and each chain's own schedule."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.planning.schedules import SCHEDULES, build_schedule
from lightning_dpipe.planning.schedules.bidirectional import Chain, bidirectional
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate
from synthetic import model_profile, pair_profile

Lengths = Sequence[tuple[int, int]]


def opposite(*lengths: Lengths, self_conditioned: int | None = None) -> list[Chain]:
    """Chains of one stage a device, every other one from the last device up."""
    chains, num = [], len(lengths[0])
    for k, own in enumerate(lengths):
        devices = range(num) if k % 2 == 0 else reversed(range(num))
        chains.append(
            Chain(
                stages=tuple(range(k * num, (k + 1) * num)),
                devices=tuple((d,) for d in devices),
                lengths=tuple(own),
                self_conditioned=k == self_conditioned,
            )
        )
    return chains


def end_of(orders: Sequence[Sequence[Op]], chains: Sequence[Chain]) -> int | None:
    """Plain event simulation of fixed orders; None: they wait for each other."""
    ends: dict[Op, int] = {}
    at, free = [0] * len(orders), [0] * len(orders)
    neighbours, lengths, estimators = {}, {}, {}
    for chain in chains:
        for i, stage in enumerate(chain.stages):
            before = chain.stages[i - 1] if i else None
            after = chain.stages[i + 1] if i + 1 < len(chain.stages) else None
            neighbours[stage], lengths[stage] = (before, after), chain.lengths[i]
            if chain.self_conditioned:
                estimators[stage] = chain.stages[-1]
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while at[d] < len(order):
                op = order[at[d]]
                needs = []
                other = neighbours[op.stage][op.kind is OpKind.B]
                if other is not None:
                    needs.append(Op(other, op.kind, op.microbatch))
                if op.kind is OpKind.F and op.stage in estimators:
                    needs.append(Op(estimators[op.stage], OpKind.S, op.microbatch))
                if not all(need in ends for need in needs):
                    break
                start = max([free[d], *(ends[need] for need in needs)])
                free[d] = ends[op] = start + lengths[op.stage][op.kind is OpKind.B]
                at[d] += 1
                moved = True
    return max(free) if all(at[d] == len(o) for d, o in enumerate(orders)) else None


def own_orders(name: str, chain: Chain, num_microbatches: int) -> list[tuple[Op, ...]]:
    """Each stage's ops in the order of the chain's own schedule."""
    own = build_schedule(
        name,
        num_stages=len(chain.stages),
        num_microbatches=num_microbatches,
        self_conditioned=chain.self_conditioned,
    )
    return [
        tuple(Op(stage, op.kind, op.microbatch) for op in order)
        for stage, order in zip(chain.stages, own.orders, strict=True)
    ]


def merges(first: Sequence[Op], second: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    """Every way to interleave two lists."""
    total = len(first) + len(second)
    for places in itertools.combinations(range(total), len(first)):
        one, other = iter(first), iter(second)
        yield tuple(next(one if i in places else other) for i in range(total))


def shortest(name: str, chains: Sequence[Chain], num_microbatches: int) -> int:
    """Brute force over all interleavings of two chains on every device."""
    down, up = (own_orders(name, chain, num_microbatches) for chain in chains)
    choices = [list(merges(a, b)) for a, b in zip(down, reversed(up), strict=True)]
    ends = (end_of(orders, chains) for orders in itertools.product(*choices))
    return min(end for end in ends if end is not None)


def order_of(name: str, chains: Sequence[Chain], num_microbatches: int) -> list[tuple[Op, ...]]:
    num = len(chains[0].stages)
    schedule = bidirectional(name, chains, num_devices=num, num_microbatches=num_microbatches)
    return list(schedule.orders)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 1), (2, 2), (3, 1)])
def test_even_backbones_end_as_early_as_any_interleaving(name, devices, microbatches) -> None:
    chains = opposite([(1, 2)] * devices, [(1, 2)] * devices)
    found = end_of(order_of(name, chains, microbatches), chains)
    assert found == shortest(name, chains, microbatches)


def test_uneven_backbones_end_within_a_third_of_the_best_interleaving_and_near_it_on_average():
    """Greedy has no look-ahead: 60 random cases against brute force."""
    draw, shares = random.Random(3), []
    for _ in range(60):
        devices, microbatches = draw.choice([(2, 1), (2, 2), (3, 1)])
        chains = opposite(
            *([(draw.randint(1, 4), draw.randint(1, 8)) for _ in range(devices)] for _ in range(2))
        )
        found = end_of(order_of("1f1b", chains, microbatches), chains)
        assert found is not None
        shares.append(found / shortest("1f1b", chains, microbatches))
    assert min(shares) >= 1
    assert max(shares) < 1.34
    assert sum(shares) / len(shares) < 1.03


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_two_devices_are_never_idle(microbatches) -> None:
    chains = opposite([(1, 2)] * 2, [(1, 2)] * 2)
    assert end_of(order_of("1f1b", chains, microbatches), chains) == 2 * microbatches * 3


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
def test_one_microbatch_takes_one_trip_of_either_chain(devices) -> None:
    """On an odd number of devices they meet on the one in the middle."""
    chains = opposite([(1, 2)] * devices, [(1, 2)] * devices)
    assert end_of(order_of("1f1b", chains, 1), chains) == 3 * devices


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_opposite_directions_lose_less_than_one_backbone_after_the_other(devices) -> None:
    chains = opposite([(1, 2)] * devices, [(1, 2)] * devices)
    for microbatches in (devices, 2 * devices, 4 * devices):
        found = end_of(order_of("1f1b", chains, microbatches), chains)
        assert found is not None
        idle, apart = found - 6 * microbatches, 2 * 3 * (devices - 1)
        assert idle <= apart / 3


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_stage_keeps_its_chain_s_own_order_and_nothing_waits_for_ever(data) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    devices, num_chains = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    microbatches = data.draw(st.integers(1, 6))
    pair = st.tuples(st.integers(0, 5), st.integers(0, 9))
    lengths = [
        data.draw(st.lists(pair, min_size=devices, max_size=devices)) for _ in range(num_chains)
    ]
    conditioned = data.draw(st.sampled_from([None, *range(num_chains)]))
    chains = opposite(*lengths, self_conditioned=conditioned)
    orders = order_of(name, chains, microbatches)
    assert end_of(orders, chains) is not None
    for chain in chains:
        own = own_orders(name, chain, microbatches)
        for stage, (device,), wanted in zip(chain.stages, chain.devices, own, strict=True):
            assert tuple(op for op in orders[device] if op.stage == stage) == wanted
    assert order_of(name, chains, microbatches) == orders


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("devices", [2, 4, 5])
def test_a_device_holds_no_more_activations_than_its_two_stages_would_alone(
    devices, microbatches
) -> None:
    chains = opposite([(1, 2)] * devices, [(3, 5)] * devices)
    for device, order in enumerate(order_of("1f1b", chains, microbatches)):
        alive, most = 0, 0
        for op in order:
            alive += 1 if op.kind is OpKind.F else -1
            most = max(most, alive)
        assert most <= min(devices - device, microbatches) + min(device + 1, microbatches)


def test_replicas_of_a_place_run_the_same_order() -> None:
    chains = [
        Chain(stages=(0, 1), devices=((0, 1), (2, 3))),
        Chain(stages=(2, 3), devices=((2, 3), (0, 1))),
    ]
    orders = bidirectional("1f1b", chains, num_devices=4, num_microbatches=3).orders
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert Counter(orders[0]).keys() == {
        Op(s, k, m) for s in (0, 3) for k in (OpKind.F, OpKind.B) for m in range(3)
    }


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_simulator_takes_as_long_as_plain_events_do(data) -> None:
    """Messages are free and no frozen work runs: only the order of ops counts."""
    times = st.lists(st.integers(1, 9), min_size=3, max_size=6)
    num_chains = data.draw(st.integers(2, 3))
    profile = pair_profile(*(model_profile(data.draw(times), width=0) for _ in range(num_chains)))
    devices, microbatches = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 4))
    plan = make_plan(
        profile, world_size=devices, batch_size=12, num_microbatches=microbatches,
        schedule=data.draw(st.sampled_from(sorted(SCHEDULES))),
    )  # fmt: skip
    schedule = schedule_of(plan)
    lengths = [[plan.lengths[i] for i in chain] for chain in plan.chains]
    expected = end_of(schedule.orders, opposite(*lengths))
    assert simulate(plan, schedule, profile).end_us == expected

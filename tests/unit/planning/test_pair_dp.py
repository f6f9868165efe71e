"""DiffusionPipe's partition of two backbones against every cut and replication."""

import itertools
import random
from collections.abc import Sequence

import pytest
from pair_brute import all_positions, random_pair

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.directions import Directions, costs_of
from lightning_dpipe.planning.pair_cuts import Position
from lightning_dpipe.planning.pair_dp import paper_pair_partition
from lightning_dpipe.planning.partition import incoming_bytes
from lightning_dpipe.planning.stage_costs import Cutting


def t_max_us(
    profile: Profile, positions: Sequence[Position], cut: Cutting, probability: float
) -> float:
    """The objective, term by term."""
    link, reduce = profile.p2p, profile.allreduce
    slowest, slowest_sc = [], []
    sync: dict[str, list[float]] = {"net0": [], "net1": []}
    backward: dict[str, list[float]] = {"net0": [], "net1": []}
    for position in positions:
        rows = -(-cut.sizes[0] // position.replicas)
        ops = ops_sc = 0
        traffic, traffic_sc = [], []
        for name, (start, stop) in (("net0", position.down), ("net1", position.up)):
            forward_us = profile.forward_us(name, start, stop, rows)
            backward[name].append(profile.backward_us(name, start, stop, rows))
            feedback = profile.graph.feedback
            fed = feedback is not None and feedback.backbone == name
            ops += forward_us + backward[name][-1]
            ops_sc += (2 if fed else 1) * forward_us + backward[name][-1]
            num_bytes = incoming_bytes(profile.graph, name)[start][stop] * rows
            wire = num_bytes * 1e6 / link.bytes_per_s
            latency = link.latency_us if num_bytes else 0
            traffic.append(2 * (wire + 2 * latency))
            traffic_sc.append(2 * (1.5 * wire + 3 * latency) if fed else traffic[-1])
            n = cut.num_groups * position.replicas
            trained = profile.trained_bytes(name, start, stop)
            sync[name].append(reduce.transfer_us(-(-2 * (n - 1) * trained // n)))
        slowest.append(max(ops, *traffic))
        slowest_sc.append(max(ops_sc, *traffic_sc))
    last = len(positions)
    gaps = [sync["net0"][p] - sum(backward["net0"][:p]) for p in range(last)]
    gaps += [sync["net1"][p] - sum(backward["net1"][p + 1 :]) for p in range(last)]
    mean = (1 - probability) * max(slowest) + probability * max(slowest_sc)
    return (cut.num_microbatches + 2 * last - 2) * mean + max(gaps)


def cutting(num_devices: int, num_microbatches: int, batch: int, memory: int | None) -> Cutting:
    return Cutting(
        sizes=split_sizes(batch, num_microbatches),
        num_devices=num_devices,
        num_groups=2,
        schedule="1f1b",
        memory_bytes=memory,
    )


def directions_of(profile: Profile) -> Directions:
    found = costs_of(profile)
    assert isinstance(found, Directions)
    return found


def peak_bytes(directions: Directions, positions: Sequence[Position], cut: Cutting) -> int:
    """The device that holds most, if both its stages are at their peaks together."""
    profile, found = directions.profile, []
    for i, position in enumerate(positions):
        total = 0
        sides = (
            (directions.down, position.down, len(positions) - i),
            (directions.up, position.up, i + 1),
        )
        for direction, (start, stop), from_back in sides:
            (costs,) = direction.costs
            layers = profile.component(costs.backbone).layers[start:stop]
            total += sum(x.param_bytes + 3 * x.trained_bytes for x in layers)
            alive = cut.sizes[: min(from_back, cut.num_microbatches)]  # 1F1B
            rows = [-(-size // position.replicas) for size in alive]
            kept = sum(costs.at("activation_bytes", r)[start, stop] for r in rows)
            again = sum(rows) * costs.input_bytes[start, stop]
            total += min(kept, again + costs.at("activation_bytes", rows[0])[start, stop])
        found.append(total)
    return max(found)


@pytest.mark.parametrize("num_down", range(1, 6))
@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_no_cut_and_no_replication_has_a_smaller_t_max(num_down: int, probability: float) -> None:
    rng = random.Random(num_down)
    limited = refused = 0
    for num_up, num_devices, num_positions in itertools.product(
        range(1, 5), range(1, 5), range(1, 4)
    ):
        if num_positions > min(num_devices, num_down, num_up):
            continue
        for _ in range(3):
            profile = random_pair(rng, num_down, num_up, feedback=probability > 0)
            directions = directions_of(profile)
            free = cutting(num_devices, rng.randint(1, 5), 5 * num_devices, None)
            every = list(all_positions(num_down, num_up, num_positions, num_devices))
            peaks = [peak_bytes(directions, positions, free) for positions in every]
            for memory in (None, rng.choice(sorted(peaks)) - rng.randint(0, 1)):
                cut = cutting(num_devices, free.num_microbatches, 5 * num_devices, memory)
                costs = [
                    t_max_us(profile, positions, cut, probability)
                    for positions, peak in zip(every, peaks, strict=True)
                    if memory is None or peak <= memory
                ]
                if not costs:
                    refused += 1
                    with pytest.raises(PlanError, match="cannot be cut into"):
                        paper_pair_partition(directions, cut, num_positions=num_positions)
                    continue
                limited += len(costs) < len(every)
                found = paper_pair_partition(
                    directions, cut, num_positions=num_positions, probability=probability
                )
                assert found.bound_us == pytest.approx(min(costs))
                assert found.positions in every
                assert t_max_us(profile, found.positions, cut, probability) == pytest.approx(
                    min(costs)
                )
    assert refused > 0
    assert limited > 0 or num_down == 1


def test_uniform_takes_one_device_a_position() -> None:
    directions = directions_of(random_pair(random.Random(1), 4, 4))
    found = paper_pair_partition(directions, cutting(2, 2, 4, None), num_positions=2, uniform=True)
    assert [position.replicas for position in found.positions] == [1, 1]
    with pytest.raises(PlanError, match="cannot be cut into 2 stages each on 3 devices"):
        paper_pair_partition(directions, cutting(3, 2, 6, None), num_positions=2, uniform=True)

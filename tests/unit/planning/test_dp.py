"""DiffusionPipe's partition against every cut and replication."""

import itertools
import random
from dataclasses import replace

import pytest
from brute import all_stages, random_profile

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Stage, split_sizes
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.planning.dp import paper_partition
from lightning_dpipe.planning.partition import incoming_bytes
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from synthetic import model_profile


def cutting(num_devices: int, num_microbatches: int, batch: int, **options: object) -> Cutting:
    return Cutting(
        sizes=split_sizes(batch, num_microbatches),
        num_devices=num_devices,
        num_groups=2,
        schedule="1f1b",
        **options,  # type: ignore[arg-type]
    )


def t_max_us(
    profile: Profile, stages: tuple[Stage, ...], cut: Cutting, probability: float
) -> float:
    """The paper's formula, term by term."""
    traffic = incoming_bytes(profile.graph, "net")
    link, reduce = profile.p2p, profile.allreduce
    slowest, slowest_sc, gaps, hidden = [], [], [], 0
    for stage in stages:
        rows = -(-cut.sizes[0] // len(stage.devices))
        span = ("net", stage.start, stage.stop, rows)
        f, b = profile.forward_us(*span), profile.backward_us(*span)
        b += f if stage.recompute else 0
        num_bytes = traffic[stage.start][stage.stop] * rows
        wire = num_bytes * 1e6 / link.bytes_per_s
        latency = link.latency_us if num_bytes else 0
        slowest.append(max(f + b, wire + 2 * latency))
        slowest_sc.append(max(2 * f + b, 1.5 * wire + 3 * latency))
        n = cut.num_groups * len(stage.devices)
        trained = profile.trained_bytes("net", stage.start, stage.stop)
        gaps.append(reduce.transfer_us(-(-2 * (n - 1) * trained // n)) - hidden)
        hidden += b
    factor = cut.num_microbatches + 2 * len(stages) - 2
    mean = (1 - probability) * max(slowest) + probability * max(slowest_sc)
    return factor * mean + max(gaps)


@pytest.mark.parametrize("num_layers", range(1, 10))
@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_no_cut_and_no_replication_has_a_smaller_t_max(num_layers: int, probability: float) -> None:
    rng = random.Random(num_layers)
    limited = refused = 0
    for num_devices, num_stages in itertools.product(range(1, 5), range(1, 4)):
        if num_stages > min(num_devices, num_layers):
            continue
        for _ in range(3):
            profile = random_profile(rng, num_layers, frozen=False, feedback=probability > 0)
            costs = BackboneCosts(profile, "net")
            batch = 5 * num_devices * rng.randint(1, 3)
            free = cutting(num_devices, rng.randint(1, 5), batch)
            every = list(all_stages(num_layers, num_stages, num_devices))
            memory = rng.choice(sorted(peak_bytes(costs, stages, free) for stages in every))
            for limit in (None, int(memory) - rng.randint(0, 1)):
                cut = cutting(num_devices, free.num_microbatches, batch, memory_bytes=limit)
                fitting = [
                    recomputing(costs, stages, cut)
                    for stages in every
                    if limit is None or peak_bytes(costs, stages, cut) <= limit
                ]
                if not fitting:
                    refused += 1
                    with pytest.raises(PlanError, match="cannot be cut into"):
                        paper_partition(costs, cut, num_stages=num_stages)
                    continue
                limited += len(fitting) < len(every)
                found = paper_partition(costs, cut, num_stages=num_stages, probability=probability)
                best = min(t_max_us(profile, stages, cut, probability) for stages in fitting)
                assert found.bound_us == pytest.approx(best)
                assert sum(part.replicas for part in found.parts) == num_devices
                borders = [part.start for part in found.parts] + [found.parts[-1].stop]
                assert borders == sorted({0, *borders, num_layers})
    assert refused > 0
    assert limited > 0 or num_layers < 4


def held_bytes(
    costs: BackboneCosts, stages: tuple[Stage, ...], i: int, cut: Cutting
) -> tuple[float, float]:
    """What a device of stage i holds at its peak: activations kept, and computed again."""
    stage, profile = stages[i], costs.profile
    layers = profile.component("net").layers[stage.start : stage.stop]
    weights = sum(x.param_bytes + 3 * x.trained_bytes for x in layers)
    alive = cut.sizes[: min(len(stages) - i, cut.num_microbatches)]  # 1F1B
    rows = [-(-size // len(stage.devices)) for size in alive]
    span = (stage.start, stage.stop)
    kept = sum(costs.at("activation_bytes", r)[span] for r in rows)
    again = sum(rows) * costs.input_bytes[span] + costs.at("activation_bytes", rows[0])[span]
    return weights + kept, weights + again


def peak_bytes(costs: BackboneCosts, stages: tuple[Stage, ...], cut: Cutting) -> float:
    """The fullest device, if each stage recomputes where that is less."""
    return max(min(held_bytes(costs, stages, i, cut)) for i in range(len(stages)))


def recomputing(costs: BackboneCosts, stages: tuple[Stage, ...], cut: Cutting) -> tuple[Stage, ...]:
    """Stages that recompute where what they keep does not fit."""
    limit = float("inf") if cut.memory_bytes is None else cut.memory_bytes
    return tuple(
        replace(stage, recompute=bool(held_bytes(costs, stages, i, cut)[0] > limit))
        for i, stage in enumerate(stages)
    )


def test_a_wider_slowest_stage_is_taken_when_it_hides_the_reduction() -> None:
    # Cut at 1: slowest 90, but the second stage reduces 3 layers behind a backward of 20.
    # Cut at 3: slowest 90 too; only a Pareto pair keeps it in the race.
    profile = model_profile(
        [10, 10, 10, 30],
        trained_bytes=1000,
        allreduce=Link(latency_us=0, bytes_per_s=10**7),
        width=0,
    )
    cut = cutting(2, 1, 1)
    found = paper_partition(BackboneCosts(profile, "net"), cut, num_stages=2)
    # sync of k layers on 2 groups: 2 * 1/2 * 1000 k bytes at 10 MB/s = 100 k us
    costs = {k: 3 * max(30 * k, 180 - 30 * k) for k in (1, 2, 3)}
    assert costs == {1: 450, 2: 360, 3: 270}
    gaps = {k: max(100 * k, 100 * (4 - k) - 20 * k) for k in (1, 2, 3)}
    assert gaps == {1: 280, 2: 200, 3: 300}
    assert found.bound_us == min(costs[k] + gaps[k] for k in (1, 2, 3)) == 560
    assert [part.stop for part in found.parts] == [2, 4]


def test_too_little_memory_is_refused() -> None:
    costs = BackboneCosts(model_profile([10] * 4), "net")
    with pytest.raises(PlanError, match="cannot be cut into 2 stages on 2 devices"):
        paper_partition(costs, cutting(2, 2, 4, memory_bytes=1000), num_stages=2)


def test_uniform_takes_one_device_a_stage() -> None:
    costs = BackboneCosts(model_profile([10] * 4), "net")
    found = paper_partition(costs, cutting(2, 2, 4), num_stages=2, uniform=True)
    assert [part.replicas for part in found.parts] == [1, 1]
    with pytest.raises(PlanError, match="cannot be cut into 2 stages on 3 devices"):
        paper_partition(costs, cutting(3, 2, 6), num_stages=2, uniform=True)

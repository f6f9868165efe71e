"""Batches of several shape classes on a pipeline: one process's gradients, bit for bit."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from bucketed import SIDES, batch, bucketed_spec, made_up_profile
from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.buckets import trace_buckets
from lightning_dpipe.planning.pairs import pair_fills
from lightning_dpipe.runtime.reduce import ThreadReduction
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.strategy.assemble import PipelineSession
from oracle import accumulate, encode, joint, whole
from pipeline import RankOutcome, gather_gradients, make_plan
from ranks import run_threads

Step = tuple[str, int]
"""Shape class and rows per rank."""

SPEC = {selfcond: bucketed_spec(selfcond=selfcond) for selfcond in (False, True)}
GRAPHS = {selfcond: trace_buckets(spec) for selfcond, spec in SPEC.items()}
PROFILES = {name: made_up_profile(graph) for name, graph in GRAPHS[False].items()}
PROFILES_SC = {name: made_up_profile(graph) for name, graph in GRAPHS[True].items()}


def fields_of(steps: Sequence[Step], step: int, rank: int, world: int):
    return batch(steps[step][0], steps[step][1], step=step, rank=rank, world=world)


def take_gradients(parameters):
    """The gradients of one accumulation window; the next one starts without."""
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def add_up(parameters, windows) -> None:
    """Leave the sum over the windows in the parameters, as an independent number of all steps."""
    for p, grads in zip(parameters, zip(*windows, strict=True), strict=True):
        p.grad = sum(grads[1:], grads[0])


def run(selfcond: bool, plan: Plan, steps: Sequence[Step], *, filled, fills, accumulation):
    """Every rank's outcome and session; gradients are summed over the windows."""
    world, base = plan.world_size, SPEC[selfcond]
    graphs = GRAPHS[selfcond]
    hub = ThreadHub(world)
    outcomes: list = [None] * world
    sessions: list = [None] * world
    reducers = {
        rank: reduction.reducer(i)
        for ranks in plan.replica_sets
        if len(ranks) > 1
        for reduction in [ThreadReduction(hub, len(ranks))]
        for i, rank in enumerate(ranks)
    }

    def work(rank: int, _) -> None:
        spec = copy.deepcopy(base)
        session = sessions[rank] = PipelineSession(
            graph=graphs[BASE], binding=bind(spec, graphs[BASE]), plan=plan, rank=rank,
            transport=hub.transport(rank), device=torch.device("cpu"), seed=7,
            reducer=reducers.get(rank), buckets={k: g for k, g in graphs.items() if k != BASE},
            fills=fills,
        )  # fmt: skip
        parameters = [p for s in session.stages.values() for p in s.parameters]
        outcome = outcomes[rank] = RankOutcome([], spec, parameters)
        devices, windows = plan.num_devices, []
        for step, (bucket, rows) in enumerate(steps):
            ahead = filled and step + 1 < len(steps)
            last = (step + 1) % accumulation == 0 or step + 1 == len(steps)
            result = session.step(
                fields_of(steps, step, rank, world),
                sizes=(rows,) * devices,
                batch_index=step,
                loss_scale=1.0 / (rows * world * accumulation),
                next_batch=fields_of(steps, step + 1, rank, world) if ahead else None,
                next_sizes=(steps[step + 1][1],) * devices if ahead else None,
                self_conditioned=selfcond and step % 2 == 0,
                reduce=last,
                bucket=bucket,
                next_bucket=steps[step + 1][0] if ahead else BASE,
            )
            if last:
                session.wait_reduction()
                windows.append(take_gradients(parameters))
            outcome.loss_sums.append(sum(float(x) for x in result.loss_sum.values()))
        add_up(parameters, windows)

    run_threads(work, world, hub=hub, timeout_s=200)
    return outcomes, sessions


def reference(selfcond: bool, plan: Plan, steps: Sequence[Step], *, filled, fills, accumulation):
    """One process over the same micro-batches; encoders run on the slices that the pair's fills
    prescribe (cut for a short batch, as `core.fills` says)."""
    spec = copy.deepcopy(SPEC[selfcond])
    world, losses, windows = plan.world_size, [], []
    parameters = [p for x in spec.backbones[0].layers for p in x.parameters() if p.requires_grad]
    for step, (bucket, rows) in enumerate(steps):
        here, loss = spec.in_bucket(bucket), 0.0
        for ranks in plan.groups:
            encoded = []
            for device, rank in enumerate(ranks):
                slices: list[Fill] = []
                if filled and step and fills is not None:
                    coin = selfcond and (step - 1) % 2 == 0
                    slices = [
                        replace(f, last=min(f.last, rows))
                        for f in fills(steps[step - 1][0], bucket)
                        if f.home == device and f.self_conditioned == coin and f.first < rows
                    ]  # fmt: skip
                slices = slices or whole(here.frozen, rows)
                fields = fields_of(steps, step, rank, world)
                encoded.append((rank, encode(here, fields, slices)))
            named = joint([x for _, x in sorted(encoded, key=lambda pair: pair[0])])
            rows_of_group = len(named["image"])
            loss += accumulate(
                here, named, min(plan.num_microbatches, rows_of_group),
                1.0 / (rows * world * accumulation),
                self_conditioned=selfcond and step % 2 == 0,
            )  # fmt: skip
        losses.append(loss)
        if (step + 1) % accumulation == 0 or step + 1 == len(steps):
            windows.append(take_gradients(parameters))
    add_up(parameters, windows)
    gradients = {
        f"{backbone.name}.{layer.name}.{i}": p.grad
        for backbone in spec.backbones
        for layer in backbone.layers
        for i, p in enumerate(layer.parameters())
        if p.requires_grad
    }
    return losses, gradients


def compare(selfcond: bool, plan: Plan, steps: Sequence[Step], *, exact: bool, filled: bool):
    profiles = PROFILES_SC if selfcond else PROFILES
    known: dict[tuple[str, str], tuple[Fill, ...]] = {}

    def fills(this: str, following: str) -> tuple[Fill, ...]:
        if (this, following) not in known:
            known[this, following] = pair_fills(plan, profiles[this], profiles[following])
        return known[this, following]

    options = {"filled": filled, "fills": fills if filled else None, "accumulation": 2}
    outcomes, sessions = run(selfcond, plan, steps, **options)
    losses, wanted = reference(selfcond, plan, steps, **options)
    for step, loss in enumerate(losses):
        assert sum(o.loss_sums[step] for o in outcomes) == pytest.approx(loss, rel=1e-6)
    found = gather_gradients(plan, outcomes)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad is not None, name
        if exact:
            assert torch.equal(found[name], grad), name
        else:
            # Sums of ten steps cancel, so an entry is compared with its tensor's largest.
            worst = (found[name] - grad).abs().max() / grad.abs().max()
            assert worst <= 1e-5, name
    return sessions, known


def every_class_twice() -> list[Step]:
    names = list(SIDES)
    return [(name, 4) for name in (*names, *names[::-1])]


def plan_of(selfcond: bool, cuts, **options) -> Plan:
    return make_plan(GRAPHS[selfcond][BASE], cuts, num_microbatches=3, batch_size=4, **options)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("cuts", [(), (6,), (4, 9)])
def test_five_classes_accumulated_by_two_are_bit_identical(cuts, filled) -> None:
    _, known = compare(False, plan_of(False, cuts), every_class_twice(), exact=True, filled=filled)
    if filled and len(cuts) == 2:
        assert len({hash(f) for f in known.values()}) > 1, "all pairs have one pair's fills"


def test_self_conditioning_feeds_back_estimates_of_every_class() -> None:
    compare(True, plan_of(True, (6,)), every_class_twice(), exact=True, filled=True)


def test_replicas_and_groups_sum_to_the_global_mean() -> None:
    plan = plan_of(False, (6,), replicas=(2, 1))
    compare(False, plan, every_class_twice(), exact=False, filled=True)
    compare(False, plan_of(False, (6,), groups=2), every_class_twice(), exact=False, filled=True)


def test_short_last_batches_of_a_class_train() -> None:
    steps = [("wide", 4), ("wide", 1), (BASE, 3), ("slim", 1), ("slim", 4), ("tall", 2)]
    compare(False, plan_of(False, (6,)), steps, exact=True, filled=True)


def test_the_memory_of_25_pairs_is_that_of_the_largest_buffers() -> None:
    pairs = list(itertools.product(SIDES, repeat=2))
    walk = [(name, 4) for pair in pairs for name in pair]
    plan = plan_of(False, (6,))
    make = partial(run, False, plan, filled=True, fills=None, accumulation=2)
    _, sessions = make(steps=walk)
    _, alone = make(steps=[(BASE, 4)] * 4)
    assert len(sessions[0]._programs) > 25
    for session, one in zip(sessions, alone, strict=True):
        # SIDES[BASE] has the most pixels, but a class's own buffers may be numbered differently.
        assert session.engine.buffers.num_bytes <= 1.1 * one.engine.buffers.num_bytes


def test_a_class_that_is_not_declared_is_refused() -> None:
    plan = plan_of(False, ())
    spec = copy.deepcopy(SPEC[False])
    hub = ThreadHub(1)
    session = PipelineSession(
        graph=GRAPHS[False][BASE], binding=bind(spec, GRAPHS[False][BASE]), plan=plan, rank=0,
        transport=hub.transport(0), device=torch.device("cpu"), seed=7,
    )  # fmt: skip
    fields = batch("wide", 4, step=0, rank=0, world=1)
    with pytest.raises(PlanError, match="'wide' is none of base"):
        session.step(fields, sizes=(4,), batch_index=0, loss_scale=1.0, bucket="wide")

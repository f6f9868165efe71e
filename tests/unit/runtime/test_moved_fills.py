"""Samples that another device of the group encodes: the numbers are those of one process."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from test_parity import all_rows, compare

from lightning_dpipe.core.errors import PlanError, ScheduleError
from lightning_dpipe.core.fills import encoders
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.program import Encode, PostRows, SendRows, StepShape, When
from lightning_dpipe.lowering.channels import plan_channels
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.runtime.encodings import Encodings
from lightning_dpipe.runtime.frozen import FrozenRunner
from lightning_dpipe.simulation.check import check_programs
from pipeline import make_plan, run_pipeline
from small import WIDTH, random_model, small_batch, small_unet


def random_fills(plan: Plan, graph, draw: random.Random, *, coins=(False,)) -> tuple[Fill, ...]:
    """Every sample of every device is encoded by some device, in slots and slices at random.

    A device's fills are a random interleaving of the chains of all that it encodes.
    """
    fills = []
    for coin in coins:
        orders = schedule_of(plan, self_conditioned=coin).orders
        for device, order in enumerate(orders):
            chains = [
                _chain(graph, owner, first, last, draw)
                for owner, first, last in _shares(plan, device, draw, coin)
            ]
            slots = [None, *order]
            mine = []
            while chains:
                chain = draw.choice(chains)
                mine.append(chain.pop(0))
                chains = [c for c in chains if c]
            at = sorted(draw.randrange(len(slots)) for _ in mine)
            for k, (owner, component, start, stop, first, last) in zip(at, mine, strict=True):
                fills.append(
                    Fill(device=device, after=slots[k], component=component, start=start,
                         stop=stop, first=first, last=last, self_conditioned=coin,
                         owner=None if owner == device else owner)
                )  # fmt: skip
    return tuple(fills)


def _shares(plan: Plan, device: int, draw: random.Random, coin: bool):
    """What a device encodes; every device draws the same cuts of all local batches."""
    common = random.Random(f"{plan.graph_digest} {plan.batch_size} {coin}")
    for owner in range(plan.num_devices):
        borders = sorted(common.sample(range(1, plan.batch_size), min(2, plan.batch_size - 1)))
        borders = [0, *borders, plan.batch_size]
        for first, last in pairwise(borders):
            if common.randrange(plan.num_devices) == device:
                yield owner, first, last


def _chain(graph, owner: int, first: int, last: int, draw: random.Random):
    """All frozen layers on one range: cut by layer, and each piece perhaps by sample."""
    found = []
    for component in graph.frozen:
        cut = draw.randint(0, len(component.layers))
        for start, stop in ((0, cut), (cut, len(component.layers))):
            middle = draw.randint(first, last)
            for low, high in ((first, middle), (middle, last)):
                if start < stop and low < high:
                    found.append((owner, component.name, start, stop, low, high))
    return found


@pytest.mark.parametrize("block", range(5))
def test_random_models_with_moved_samples_equal_one_process(block: int) -> None:
    """105 in all, on up to 8 ranks; bit-identical without replicas."""
    moved = 0
    for seed in range(21 * block, 21 * block + 21):
        draw = random.Random(seed)
        make = partial(random_model, seed)
        graph = trace(make())
        layers = len(graph.backbones[0].layers)
        num_stages = draw.randint(1 + (seed % 4 > 0), min(4, layers))
        cuts = sorted(draw.sample(range(1, layers), num_stages - 1))
        replicas = tuple(draw.choice((1, 1, 2)) for _ in range(num_stages))
        groups = draw.choice((1, 1, 2)) if sum(replicas) <= 4 else 1
        world, rows = sum(replicas) * groups, draw.randint(2, 5)
        microbatches = draw.randint(1, rows * sum(replicas) // max(replicas))
        plan = make_plan(
            graph, cuts, num_microbatches=microbatches, batch_size=rows,
            schedule=draw.choice(("gpipe", "1f1b")), replicas=replicas, groups=groups,
        )  # fmt: skip
        fills = random_fills(plan, graph, draw)
        plan = make_plan(
            graph, cuts, num_microbatches=microbatches, batch_size=rows, schedule=plan.schedule,
            replicas=replicas, groups=groups, fills=fills,
        )  # fmt: skip
        moved += any(f.owner is not None for f in fills)
        batches = all_rows(world, rows, 3)
        compare(make, plan, batches, exact=world == num_stages, filled=True, accumulate=3)
    assert moved >= 13, f"only {moved} of 21 plans move samples"


def two_stages(num_microbatches: int = 4, batch_size: int = 6, **options) -> tuple[Plan, object]:
    """Device 0 encodes half of device 1's samples, layer by layer."""
    graph = trace(small_unet(3, **options))
    fills = (
        _fill(0, "0F0", "text", 0, 3, 0, 6),
        _fill(0, "0F1", "noise", 0, 1, 0, 6),
        _fill(0, "0F2", "text", 0, 2, 3, 6, owner=1),
        _fill(0, "0B0", "text", 2, 3, 3, 6, owner=1),
        _fill(0, "0B1", "noise", 0, 1, 3, 6, owner=1),
        _fill(1, None, "text", 0, 3, 0, 3),
        _fill(1, "1B2", "noise", 0, 1, 0, 3),
    )
    plan = make_plan(
        graph, (4,), num_microbatches=num_microbatches, batch_size=batch_size, fills=fills
    )
    return plan, graph


def _fill(device, after, component, start, stop, first, last, owner=None):
    after = None if after is None else Op.parse(after)
    return Fill(device=device, after=after, component=component, start=start, stop=stop,
                first=first, last=last, owner=owner)  # fmt: skip


def test_self_conditioned_steps_move_their_own_samples() -> None:
    make = partial(small_unet, 2, self_conditioning=True)
    graph = trace(make())
    options = {"num_microbatches": 3, "batch_size": 4}
    fills = random_fills(
        make_plan(graph, (2, 4), **options), graph, random.Random(5), coins=(False, True)
    )
    assert {f.self_conditioned for f in fills if f.owner is not None} == {False, True}
    plan = make_plan(graph, (2, 4), **options, fills=fills)
    compare(make, plan, all_rows(3, 4, 4), exact=True, filled=True, coins=(True, False, True, True))


@pytest.mark.parametrize("rows", [(6, 6), (6, 4), (2, 1), (5, 6), (6, 3), (1, 2)])
def test_rows_of_a_short_next_batch_are_cut_from_moved_fills(rows: tuple[int, int]) -> None:
    make = partial(small_unet, 3)
    plan, _ = two_stages()
    short = [small_batch(n, seed=9 + r) for r, n in enumerate(reversed(rows))]
    compare(make, plan, [*all_rows(2, 6, 2), short], exact=True, filled=True)


def test_rows_beyond_the_plan_are_encoded_at_home() -> None:
    plan, graph = two_stages()
    shape = StepShape(sizes=(6, 6), next_sizes=(7, 8), encoded=True)
    programs = lower(plan, schedule_of(plan), graph, shape)
    check_programs(programs)
    last = [p.instructions[-3:] for p in programs]
    assert all(
        any(isinstance(x, Encode) and x.first == 6 and x.owner is None for x in tail)
        for tail in last
    )


def test_batch_fields_go_to_the_encoder_and_encoded_rows_home_and_to_readers() -> None:
    plan, graph = two_stages()
    shape = StepShape(sizes=(6, 6), next_sizes=(6, 6), encoded=True)
    programs = lower(plan, schedule_of(plan), graph, shape)
    check_programs(programs)
    opened = set(plan_channels(plan, graph))
    names = [v.name for v in graph.values]
    sent = {
        (p.device, names[x.value], x.owner)
        for p in programs
        for x in p.instructions
        if isinstance(x, SendRows)
    }
    # Fields of device 1's samples travel to device 0; what the last stage reads of them returns.
    assert {(1, "tokens", None), (1, "image", None)} <= sent
    assert {name for device, name, owner in sent if device == 0 and owner == 1} == {
        "context", "target",
    }  # fmt: skip
    posts = [x for p in programs for x in p.instructions if isinstance(x, PostRows)]
    assert {x.message.channel for x in posts} <= opened
    whole = [x for x in posts if names[x.value] == "tokens"]
    assert [(x.device, x.first, x.last) for x in whole] == [(1, 3, 6)], "only what is encoded there"


def test_a_sample_of_two_encoders_is_refused() -> None:
    plan, graph = two_stages()
    doubled = (*plan.fills, _fill(1, "1B3", "text", 0, 3, 3, 4))
    with pytest.raises(PlanError, match="devices 0 and 1 both encode samples 3:4 of device 1"):
        encoders(doubled, (6, 6))
    stranger = _fill(0, None, "text", 0, 3, 0, 6, owner=2)
    with pytest.raises(PlanError, match=r"samples of device 2; the group has devices 0\.\.1"):
        make_plan(graph, (4,), num_microbatches=4, batch_size=6, fills=(stranger,))


def test_moved_samples_train_as_unmoved_ones_do() -> None:
    plan, graph = two_stages()
    home = make_plan(graph, (4,), num_microbatches=4, batch_size=6)
    batches = all_rows(2, 6, 4)
    losses = [
        [o.loss_sums for o in run_pipeline(partial(small_unet, 3), p, batches, filled=True)]
        for p in (plan, home)
    ]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-6, atol=0)


def test_what_only_frozen_layers_read_is_dropped_once_all_moved_rows_have_passed() -> None:
    spec = small_unet(3)
    graph = trace(spec)
    runner = FrozenRunner(graph, bind(spec, graph).layers)
    bank = Encodings(graph, 0, torch.device("cpu"))
    fields = small_batch(4, seed=1)
    bank.begin({v: fields[graph.values[v].name] for v in graph.inputs}, (4, 6))
    tokens = next(v for v in graph.inputs if graph.values[v].name == "tokens")
    bank.landing(tokens, 1, 2, 6).copy_(torch.randn(4, WIDTH))
    inner = graph.component("text").layers[1].writes[0]

    def encode(start: int, stop: int, first: int, last: int) -> None:
        work = Encode(component="text", start=start, stop=stop, first=first, last=last,
                      when=When.NEXT, owner=1, fields=(), rows=4)  # fmt: skip
        runner.run(work, bank)

    encode(0, 2, 2, 6)
    encode(2, 3, 2, 4)
    assert bank.read(inner, 1, 2, 6).shape == (4, WIDTH)
    encode(2, 3, 4, 6)
    with pytest.raises(KeyError):
        bank.read(inner, 1, 2, 6)
    context = graph.component("text").layers[2].writes[0]
    assert bank.read(context, 1, 2, 6).shape == (4, WIDTH)


def lowered_with(change) -> list:
    """Programs of `two_stages`, device 1's sends of batch fields and their receives changed."""
    plan, graph = two_stages()
    shape = StepShape(sizes=(6, 6), next_sizes=(6, 6), encoded=True)
    tokens = next(v for v in graph.inputs if graph.values[v].name == "tokens")
    return [
        replace(p, instructions=tuple(change(p.instructions, tokens)))
        for p in lower(plan, schedule_of(plan), graph, shape)
    ]


def test_fields_that_nobody_posts_are_missed_before_anything_runs() -> None:
    def dropped(instructions, tokens):
        for x in instructions:
            if not (isinstance(x, SendRows | PostRows) and x.value == tokens):
                yield x

    with pytest.raises(ScheduleError, match=r"encodes samples \[3, 6\) of value 0 from device 1"):
        check_programs(lowered_with(dropped))


def test_fields_that_are_sent_after_what_waits_for_their_encoder_are_a_deadlock() -> None:
    def late(instructions, tokens):
        sends = [x for x in instructions if isinstance(x, SendRows)]
        held = [x for x in sends if x.message.channel.source == 0]
        return [*(x for x in instructions if x not in held), *held]

    with pytest.raises(ScheduleError, match=r"deadlock: .*\(Encode\) on 0:next:3:6"):
        check_programs(lowered_with(late))

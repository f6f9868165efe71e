"""Programs: what they hold, and what they must never grow with."""

from collections import Counter
from dataclasses import replace

import pytest

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.program import (
    Backward,
    Forward,
    Gather,
    PostRecv,
    Reduce,
    Send,
    StepShape,
)
from lightning_dpipe.lowering.channels import plan_channels
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.check import check_programs
from pipeline import make_plan, opposite_plan
from small import cascade, small_unet


def programs(cuts=(3, 5), num_microbatches=4, batch_size=8, schedule="1f1b", groups=1, **shape):
    graph = trace(small_unet(3, self_conditioning=shape.get("self_conditioned", False)))
    plan = make_plan(
        graph, cuts, num_microbatches=num_microbatches, batch_size=batch_size, schedule=schedule,
        groups=groups,
    )  # fmt: skip
    order = schedule_of(plan, self_conditioned=shape.get("self_conditioned", False))
    sizes = (batch_size,) * plan.num_devices
    return plan, graph, lower(plan, order, graph, StepShape(sizes=sizes, **shape))


def test_a_skip_goes_straight_to_its_reader() -> None:
    plan, graph, lowered = programs(cuts=(2, 3, 5, 7))
    hops = Counter(
        (
            int(x.message.tag.split(":")[0]),
            x.message.channel.source,
            x.message.channel.target,
        )
        for p in lowered
        for x in p.instructions
        if isinstance(x, Send) and x.message.tag.endswith(":F")
    )
    # down0 (layer 2, stage 1) is `h` for down1 (stage 2) and the skip of up0 (layer 7, stage 4).
    stage_rank = plan.groups[0]
    value = graph.backbones[0].layers[2].writes[0]
    skip = [k for k in hops if k[0] == value]
    assert {k[1:] for k in skip} == {(stage_rank[1], stage_rank[i]) for i in (2, 4)}
    assert set(hops.values()) == {plan.num_microbatches}


def test_boundary_buffers_do_not_grow_with_the_microbatches() -> None:
    few = programs(num_microbatches=6, batch_size=8)[2]
    many = programs(num_microbatches=24, batch_size=32)[2]
    assert [len(p.buffers) for p in few] == [len(p.buffers) for p in many]


def test_every_program_channel_is_in_the_plan_s_list() -> None:
    for variant in ({}, {"self_conditioned": True}, {"next_sizes": (8, 8, 8)}):
        plan, graph, lowered = programs(**variant)
        opened = set(plan_channels(plan, graph))
        used = {x.message.channel for p in lowered for x in p.instructions if hasattr(x, "message")}
        assert used <= opened


def test_a_receive_is_posted_before_the_op_that_precedes_its_use() -> None:
    _, _, lowered = programs(num_microbatches=8)
    for program in lowered:
        works = [i for i, x in enumerate(program.instructions) if isinstance(x, Forward | Backward)]
        for at, x in enumerate(program.instructions):
            if isinstance(x, PostRecv):
                wait = next(
                    i
                    for i, y in enumerate(program.instructions)
                    if i > at and getattr(y, "slot", None) == x.slot
                )
                between = sum(at < w < wait for w in works)
                assert between >= 1 or at < works[0]


def test_reduce_follows_the_last_backward_of_each_stage_only_with_replicas() -> None:
    _, _, alone = programs()
    assert not any(isinstance(x, Reduce) for p in alone for x in p.instructions)
    plan, _, replicated = programs(groups=2)
    for program in replicated:
        found = [i for i, x in enumerate(program.instructions) if isinstance(x, Reduce)]
        last = max(i for i, x in enumerate(program.instructions) if isinstance(x, Backward))
        assert len(found) == len(plan.stages_on(program.device))
        assert all(i > last for i in found)


def test_a_batch_smaller_than_the_microbatches_is_refused_with_both_numbers() -> None:
    graph = trace(small_unet(2))
    plan = make_plan(graph, (3,), num_microbatches=8, batch_size=8)
    with pytest.raises(PlanError, match=r"batch of 4 samples cannot be cut into 8 micro-batches"):
        lower(plan, schedule_of(plan), graph, StepShape(sizes=(2, 2)))


def test_a_replica_beside_a_stage_on_other_devices_is_refused_by_name() -> None:
    graph = trace(small_unet(2))
    plan = make_plan(graph, (3,), num_microbatches=2, batch_size=8)
    wide = replace(plan, stages=(replace(plan.stages[0], devices=(0, 1)), plan.stages[1]))
    with pytest.raises(UnsupportedError, match=r"device 1 holds a replica of stage 0.*stage 1"):
        lower(wide, schedule_of(plan), graph, StepShape(sizes=(8, 8)))


def opposite(num_microbatches: int, groups: int = 1):
    graph = trace(cascade((3, 2)))
    plan = opposite_plan(
        graph, ((3, 5, 7), (2, 4, 6)), num_microbatches=num_microbatches,
        batch_size=num_microbatches, groups=groups,
    )  # fmt: skip
    programs = lower(plan, schedule_of(plan), graph, StepShape(sizes=(num_microbatches,) * 4))
    check_programs(programs)
    return plan, graph, programs


def test_two_backbones_on_a_device_have_slots_and_channels_of_their_own() -> None:
    plan, graph, lowered = opposite(4, groups=2)
    opened = set(plan_channels(plan, graph))
    for program in lowered:
        used = {x.message.channel for x in program.instructions if hasattr(x, "message")}
        assert used <= opened
        losses = [x.op.stage for x in program.instructions if isinstance(x, Forward) and x.loss]
        assert losses == {0: [7] * 4, 3: [3] * 4}.get(program.device, [])
        reduced = [x.stage for x in program.instructions if isinstance(x, Reduce)]
        assert sorted(reduced) == list(plan.stages_on(program.device))


def test_buffers_of_two_backbones_do_not_grow_with_the_microbatches() -> None:
    few, many = (opposite(num)[2] for num in (6, 24))
    assert [len(p.buffers) for p in many] == [len(p.buffers) for p in few]


def test_a_context_that_both_backbones_read_is_gathered_once_a_microbatch() -> None:
    """Device 0 holds the first layers of one backbone and the last of the other."""
    _, graph, lowered = opposite(4)
    shared = [v for v in graph.side_inputs if graph.values[v].name == "time"]
    for program in lowered:
        gathers = Counter(
            x.value for x in program.instructions if isinstance(x, Gather) and x.value in shared
        )
        assert all(count == 4 for count in gathers.values())

"""Deadlock with rendezvous sends: found exactly when an event graph has a cycle."""

import graphlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.program import (
    Instruction,
    Lane,
    Message,
    PostRecv,
    Program,
    Send,
    WaitRecv,
    When,
)
from lightning_dpipe.simulation.check import check_programs
from lightning_dpipe.simulation.rendezvous import check_progress
from unit.simulation.tiny import (
    forward,
    gather,
    message,
    pipeline,
    post,
    post_rows,
    program,
    send,
    send_rows,
    wait,
)

DOWN, UP = message(0, 1, "down"), message(1, 0, "up")
ROWS = message(1, 0, "rows", lane=Lane.ROWS)


def test_exchange_with_receives_posted_ahead_passes() -> None:
    make = forward("0F0", (), (0,))
    check_programs(
        [
            program(0, make, post(UP, 1), send(DOWN, 0), wait(UP, 1)),
            program(1, make, post(DOWN, 1), send(UP, 0), wait(DOWN, 1)),
        ]
    )


def test_waiting_before_sending_on_both_sides_is_a_deadlock() -> None:
    make = forward("0F0", (), (0,))
    with pytest.raises(ScheduleError) as caught:
        check_programs(
            [
                program(0, make, post(UP, 1), wait(UP, 1), send(DOWN, 0)),
                program(1, make, post(DOWN, 1), wait(DOWN, 1), send(UP, 0)),
            ]
        )
    text = str(caught.value)
    assert "rank 0 blocks at instruction 2 (WaitRecv) on up, message 0" in text
    assert "rank 1 blocks at instruction 2 (WaitRecv) on down, message 0" in text
    assert "pipeline channel 1->0, where 0 are sent and 1 posted" in text


def test_a_receive_that_blocks_the_channel_is_a_deadlock() -> None:
    """FIFO: the second message cannot arrive while the first one's receive is not posted."""
    a, b = message(1, 0, "a"), message(1, 0, "b")
    sender = program(1, forward("1F0", (), (0, 1)), send(a, 0), post(DOWN, 2), wait(DOWN, 2))
    late = replace(sender, instructions=(*sender.instructions, send(b, 1)))
    receiver = program(
        0,
        forward("0F0", (), (5,)),
        post(a, 0, 0),
        post(b, 1, 1),
        wait(a, 0),
        wait(b, 1),
        send(DOWN, 5),
    )
    with pytest.raises(ScheduleError, match=r"rank 0 blocks at instruction 4 .* on b, message 1"):
        check_programs([receiver, late])


def test_a_gather_waits_for_the_rows_it_reads() -> None:
    receiver = program(0, post_rows(ROWS, device=1), gather(0, (1, 0, 4)))
    check_programs([receiver, program(1, send_rows(ROWS))])
    make = forward("0F0", (), (0,))
    hidden = program(
        0,
        make,
        post(UP, 1),
        post_rows(ROWS, device=1),
        gather(2, (1, 2, 4)),
        send(DOWN, 0),
        wait(UP, 1),
    )
    circular = program(1, make, post(DOWN, 1), wait(DOWN, 1), send_rows(ROWS), send(UP, 0))
    with pytest.raises(ScheduleError, match=r"rank 0 blocks at instruction 3 \(Gather\) on rows"):
        check_programs([hidden, circular])


def test_a_gather_of_other_rows_does_not_wait() -> None:
    make = forward("0F0", (), (0,))
    first = message(1, 0, "rows/0", lane=Lane.ROWS)
    later = message(1, 0, "rows/1", lane=Lane.ROWS)
    receiver = program(
        0,
        make,
        post_rows(first, device=1, first=0, last=2),
        post_rows(later, device=1, first=2, last=4),
        gather(2, (1, 0, 2), (0, 2, 4)),
        send(DOWN, 0),
        gather(3, (1, 0, 4)),
    )
    sender = program(
        1, post(DOWN, 1), send_rows(first, last=2), wait(DOWN, 1), send_rows(later, first=2)
    )
    check_programs([receiver, sender])


def test_rows_of_the_next_batch_hold_up_nothing_but_their_channel() -> None:
    ahead = message(1, 0, "next", lane=Lane.ROWS)
    receiver = program(
        0,
        post_rows(ROWS, device=1),
        post_rows(ahead, device=1, when=When.NEXT),
        gather(0, (1, 0, 4)),
    )
    check_programs([receiver, program(1, send_rows(ROWS), send_rows(ahead, when=When.NEXT))])
    only = program(0, post_rows(ahead, device=1, when=When.NEXT), gather(0, (1, 0, 4)))
    with pytest.raises(ScheduleError, match=r"gathers samples \[0, 4\) .* for sample 0"):
        check_programs([only, program(1, send_rows(ahead, when=When.NEXT))])


def test_a_gather_needs_every_row_unless_they_came_with_the_step_before() -> None:
    half = program(0, post_rows(ROWS, device=1, last=2), gather(0, (0, 0, 4), (1, 0, 4)))
    with pytest.raises(ScheduleError, match="from device 1, but no receive is posted for sample 2"):
        check_programs([half, program(1, send_rows(ROWS, last=2))])
    check_programs([program(0, gather(0, (1, 0, 4)), encoded=True)])


def test_a_pipeline_whose_receives_are_posted_late_still_ends() -> None:
    """Sends wait for nobody inside the step, so posting right before the wait is legal."""
    first, second = pipeline(3)
    check_programs([_posted_late(first), _posted_late(second)])


def _posted_late(found: Program) -> Program:
    posts = {i.slot: i for i in found.instructions if isinstance(i, PostRecv)}
    late: list[Instruction] = []
    for instruction in found.instructions:
        if isinstance(instruction, WaitRecv):
            late.append(posts[instruction.slot])
        if not isinstance(instruction, PostRecv):
            late.append(instruction)
    return replace(found, instructions=tuple(late))


def has_cycle(programs: Sequence[Program]) -> bool:
    """Event graph: program order, and each wait after its message's send (and own post)."""
    sends: dict[object, list[tuple[int, int]]] = defaultdict(list)
    edges: dict[tuple[int, int], set[tuple[int, int]]] = {}
    waits = []
    for found in programs:
        posted: dict[int, tuple[object, int]] = {}
        counts: dict[object, int] = defaultdict(int)
        for i, instruction in enumerate(found.instructions):
            edges[found.rank, i] = {(found.rank, i - 1)} if i else set()
            if isinstance(instruction, Send):
                sends[instruction.message.channel].append((found.rank, i))
            elif isinstance(instruction, PostRecv):
                channel = instruction.message.channel
                posted[instruction.slot] = (channel, counts[channel])
                counts[channel] += 1
            elif isinstance(instruction, WaitRecv):
                waits.append(((found.rank, i), posted[instruction.slot]))
    for event, (channel, k) in waits:
        edges[event].update(sends[channel][: k + 1])
    try:
        tuple(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError:
        return True
    return False


@st.composite
def traffic(draw: st.DrawFn) -> list[Program]:
    """Random messages between ranks; each rank sends and waits in any order (FIFO kept)."""
    num_ranks = draw(st.integers(2, 3))
    rank = st.integers(0, num_ranks - 1)
    pairs = draw(st.lists(st.tuples(rank, rank), min_size=4, max_size=8))
    messages = [message(a, b, f"m{slot}") for slot, (a, b) in enumerate(pairs) if a != b]
    programs = []
    for me in range(num_ranks):
        out = iter([m for m in messages if m.channel.source == me])
        into = [m for m in messages if m.channel.target == me]
        late = draw(st.booleans())
        line: list[Instruction] = [] if late else [post(m, _slot(m), _slot(m)) for m in into]
        coming = iter(into if late else draw(st.permutations(into)))
        num_out = sum(m.channel.source == me for m in messages)
        for sends in draw(st.permutations([True] * num_out + [False] * len(into))):
            if sends:
                m = next(out)
                line.append(send(m, _slot(m)))
            else:
                m = next(coming)
                line += [post(m, _slot(m), _slot(m))] * late + [wait(m, _slot(m))]
        programs.append(program(me, *line))
    return programs


def _slot(msg: Message) -> int:
    return int(msg.tag[1:])


@settings(deadline=None, max_examples=300)
@given(traffic())
def test_finds_a_deadlock_exactly_when_the_events_form_a_circle(programs: list[Program]) -> None:
    try:
        check_progress(programs)
        found = False
    except ScheduleError:
        found = True
    assert found == has_cycle(programs)

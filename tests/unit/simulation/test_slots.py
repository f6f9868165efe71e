"""Slots and buffers: each way of using one wrongly is refused, right ways are not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.program import (
    Backward,
    Forward,
    Free,
    Instruction,
    PostRecv,
    Send,
    WaitRecv,
    Zeros,
)
from lightning_dpipe.simulation.slots import check_slots
from unit.simulation.tiny import (
    backward,
    forward,
    free,
    gather,
    message,
    pipeline,
    post,
    program,
    send,
    wait,
)

H0, H1 = message(1, 0, "h/0"), message(1, 0, "h/1")
OUT = message(0, 1, "out")


@pytest.mark.parametrize(
    ("instructions", "problem"),
    [
        ((wait(H0, 0),), "0: waits for h/0 in slot 0, where nothing is posted"),
        ((post(H0, 0), wait(H1, 0)), "waits for h/1 in slot 0, where h/0 is posted"),
        ((post(H0, 0), wait(H0, 0), wait(H0, 0)), "2: waits for h/0"),
        ((post(H0, 0),), r"slot 0 \(h/0\) is posted but never waited for"),
        ((forward("0F0", (3,)),), "reads slot 3, which nothing has written"),
        ((post(H0, 0), forward("0F0", (0,))), "reads slot 0 before h/0 has arrived"),
        ((send(OUT, 2),), "reads slot 2, which nothing has written"),
        ((free(0),), "reads slot 0, which nothing has written"),
        ((gather(0), free(0), send(OUT, 0)), "reads slot 0, freed at instruction 1"),
        ((gather(0), free(0), free(0)), "reads slot 0, freed at instruction 1"),
        ((gather(0), gather(0)), "writes slot 0, which is in use"),
        ((post(H0, 0), gather(0)), "writes slot 0, which is in use"),
        ((gather(0), forward("0F0", (), (0,))), "writes slot 0, which is in use"),
        ((gather(16),), "writes slot 16 of 16"),
        ((gather(0, buffer=4),), "uses buffer 4 of 4"),
        ((gather(0, buffer=0), gather(1, buffer=0)), "into buffer 0, still held by slot 0"),
        ((post(H0, 0, 2), Zeros(slot=1, buffer=2)), "into buffer 2, still held by slot 0"),
        (
            (gather(0, buffer=0), send(OUT, 0), free(0), gather(1, buffer=0)),
            "still held by the send of out",
        ),
        (
            (gather(0, buffer=0), forward("0F0", (0,)), free(0), gather(1, buffer=0)),
            "still held by the backward of 0F0",
        ),
        (
            (
                gather(0, buffer=0),
                forward("0F0", (0,)),
                backward("0I0"),
                free(0),
                gather(1, buffer=0),
                backward("0W0"),
            ),
            "4: .* still held by the backward of 0F0",
        ),
        ((backward("0B0"),), "0B0 has no training F"),
        ((forward("0F0", training=False), backward("0B0")), "0B0 has no training F"),
        ((forward("0F0"), backward("0B0"), backward("0B0")), "0B0 has no training F"),
        ((forward("0F0"), backward("0W0")), "0W0 has no I"),
        ((forward("0F0"), forward("0F0")), "0F0 runs twice"),
        ((forward("0F0"), backward("0B0", (5,))), "reads slot 5"),
    ],
)
def test_wrong_use_is_named(instructions: tuple[Instruction, ...], problem: str) -> None:
    with pytest.raises(ScheduleError, match="rank 0, instruction .*" + problem):
        check_slots(program(0, *instructions))


def test_a_receive_needs_a_buffer_of_its_shape() -> None:
    wrong = replace(H0, shape=(4, 7))
    message = r"float32\[4, 7\] into rows 0:4 of buffer 0 of float32\[4, 8\]"
    with pytest.raises(ScheduleError, match=message):
        check_slots(program(0, post(wrong, 0)))


@pytest.mark.parametrize(
    "instructions",
    [
        (gather(0, buffer=0), free(0), gather(0, buffer=0)),
        (gather(0), forward("0F0", (0,)), free(0), gather(0)),
        (gather(0, buffer=0), forward("0F0", (0,), training=False), free(0), gather(1, buffer=0)),
        (
            gather(0, buffer=0),
            forward("0F0", (0,)),
            free(0),
            backward("0B0"),
            gather(0, buffer=0),
        ),
        (gather(0, buffer=0), forward("0F0", (0,)), backward("0I0"), free(0), gather(1, buffer=0)),
        (forward("0F0"), backward("0I0"), backward("0W0")),
        (forward("0F0"), forward("0F1"), backward("0B1"), backward("0B0")),
    ],
)
def test_right_use_passes(instructions: tuple[Instruction, ...]) -> None:
    check_slots(program(0, *instructions))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_no_instruction_of_a_program_can_be_dropped(data: st.DataObject) -> None:
    """Mutation: drop any one; only frees (a leak, not an error) may go unnoticed."""
    found = data.draw(st.sampled_from(pipeline(3)))
    at = data.draw(st.integers(0, len(found.instructions) - 1))
    dropped = found.instructions[at]
    kept = (*found.instructions[:at], *found.instructions[at + 1 :])
    mutant = program(found.rank, *kept)
    # A send leaves its slot as it was, and a last backward without returns has no reader.
    harmless = isinstance(dropped, Free | Send) or (
        isinstance(dropped, Backward) and not dropped.returns
    )
    if harmless or (isinstance(dropped, Forward) and not dropped.training):
        check_slots(mutant)
    else:
        assert isinstance(dropped, PostRecv | WaitRecv | Forward | Backward)
        with pytest.raises(ScheduleError):
            check_slots(mutant)

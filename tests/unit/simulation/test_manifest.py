"""Both sides of a channel must list the same messages; the digest sees any difference."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.program import Lane, Message, PostRecv, StepShape
from lightning_dpipe.simulation.check import check_programs, manifest_digest
from unit.simulation.tiny import forward, message, pipeline, post, program, send, wait


def test_the_pipeline_passes() -> None:
    check_programs(pipeline(3))


def test_a_group_of_one_device_needs_no_messages() -> None:
    check_programs([program(0, forward("0F0", (), (0,)))])


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"tag": "h/9"}, r"rank 0 sends h/0 float32\[4, 8\], rank 1 posts h/9 float32\[4, 8\]"),
        ({"shape": (3, 8)}, r"rank 1 posts h/0 float32\[3, 8\]"),
        ({"dtype": "bfloat16"}, r"rank 1 posts h/0 bfloat16\[4, 8\]"),
    ],
)
def test_a_different_message_is_shown_from_both_sides(change: dict, shown: str) -> None:
    first, second = pipeline(2)
    other = replace(second.instructions[0].message, **change)
    posts = replace(second.instructions[0], message=other)
    with pytest.raises(ScheduleError, match="message 0 of the pipeline channel 0->1: .*" + shown):
        check_programs([first, replace(second, instructions=(posts, *second.instructions[1:]))])


def test_a_missing_receive_is_shown_as_nothing() -> None:
    h = message(0, 1, "h/0")
    sender = program(0, forward("0F0", (), (0,)), send(h, 0))
    with pytest.raises(ScheduleError, match="rank 1 posts nothing"):
        check_programs([sender, program(1)])
    with pytest.raises(ScheduleError, match="rank 0 sends nothing"):
        check_programs([program(0), program(1, post(h, 0), wait(h, 0))])


def test_swapped_order_is_a_mismatch() -> None:
    first, second = pipeline(2)
    a, b, *rest = second.instructions
    with pytest.raises(ScheduleError, match=r"message 0 .* posts h/1"):
        check_programs([first, replace(second, instructions=(b, a, *rest))])


@pytest.mark.parametrize(
    "foreign",
    [message(2, 1, "h"), message(0, 0, "h"), message(0, 1, "h", lane=Lane.ROWS)],
    ids=["of another rank", "to itself", "of the other lane"],
)
def test_a_foreign_channel_is_refused(foreign: Message) -> None:
    with pytest.raises(ScheduleError, match="rank 0, instruction 1: Send h"):
        check_programs([program(0, forward("0F0", (), (0,)), send(foreign, 0)), program(1)])


def test_programs_must_be_of_one_group_and_step() -> None:
    first, second = pipeline(1)
    with pytest.raises(ScheduleError, match=r"ranks \[0, 0\]"):
        check_programs([first, first])
    with pytest.raises(ScheduleError, match="2 step shapes"):
        check_programs([first, replace(second, shape=StepShape(sizes=(4, 3)))])


def test_replicas_of_the_pipeline_share_a_digest() -> None:
    assert manifest_digest(pipeline(3)) == manifest_digest(pipeline(3, first_rank=2))


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_digest_and_the_check_see_every_change_of_one_receive(data: st.DataObject) -> None:
    first, second = pipeline(3)
    at = data.draw(st.integers(0, 2))
    found = second.instructions[at]
    assert isinstance(found, PostRecv)
    change = data.draw(
        st.sampled_from([{"tag": "x"}, {"shape": (1,)}, {"dtype": "int8"}, {"tag": "h/9"}])
    )
    changed = list(second.instructions)
    changed[at] = replace(found, message=replace(found.message, **change))
    mutant = (first, replace(second, instructions=tuple(changed)))
    assert manifest_digest(mutant) != manifest_digest((first, second))
    with pytest.raises(ScheduleError, match=f"message {at} "):
        check_programs(mutant)

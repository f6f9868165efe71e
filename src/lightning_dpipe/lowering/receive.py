"""Second pass: post receives ahead of their use, in the order in which the sender sends.

A channel is FIFO (NCCL has no tags), so a receiver must post in the sender's order whatever order
it needs the values in. Posting early lets transfers hide behind compute; posting too early costs
buffers, so a receive is posted `WINDOW` ops before the op that waits for it.
"""

from collections.abc import Sequence

from lightning_dpipe.core.program import Channel, Message, PostRecv, PostRows, Send, SendRows
from lightning_dpipe.lowering.emit import Emitted, Need

WINDOW = 3


def post_receives(emitted: Sequence[Emitted]) -> list[Emitted]:
    """Insert PostRecv instructions and bring PostRows into channel order, in place."""
    sent: dict[Channel, list[Message]] = {}
    for device in emitted:
        for step in device.steps:
            for instruction in step.instructions:
                if isinstance(instruction, Send | SendRows):
                    sent.setdefault(instruction.message.channel, []).append(instruction.message)
    for device in emitted:
        _post_pipeline(device, sent)
        _order_rows(device, sent)
    return list(emitted)


def _post_pipeline(device: Emitted, sent: dict[Channel, list[Message]]) -> None:
    needs: dict[Channel, dict[Message, Need]] = {}
    for need in device.needs:
        needs.setdefault(need.message.channel, {})[need.message] = need
    posts: list[tuple[int, Need]] = []
    for channel, wanted in needs.items():
        latest = len(device.steps)
        for message in reversed(sent.get(channel, [])):
            need = wanted[message]
            latest = min(latest, max(need.step - WINDOW, 0))
            posts.append((latest, need))
    # `posts` runs backwards along each channel, so inserting at the front restores its order.
    for step, need in posts:
        device.steps[step].instructions.insert(
            0,
            PostRecv(
                message=need.message,
                slot=need.slot,
                buffer=-1,
                first=need.first,
                last=need.last,
            ),
        )


def _order_rows(device: Emitted, sent: dict[Channel, list[Message]]) -> None:
    """Sort the prologue's PostRows of each channel into the order of the sender's sends."""
    prologue = device.steps[0].instructions
    places = [i for i, x in enumerate(prologue) if isinstance(x, PostRows)]
    posts = [x for x in prologue if isinstance(x, PostRows)]
    position = {m: i for messages in sent.values() for i, m in enumerate(messages)}
    posts.sort(key=lambda p: (p.message.channel.source, position[p.message]))
    for place, post in zip(places, posts, strict=True):
        prologue[place] = post

"""The manifest: every message of every channel, in order, as sender and receiver see it.

Messages carry no header at run time, so both sides must agree on name, shape, dtype and order
beforehand. `check_manifest` compares the two sides within one process's programs;
`manifest_digest` lets ranks compare theirs at start.
"""

from collections.abc import Sequence
from itertools import zip_longest

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.program import (
    Channel,
    Lane,
    Message,
    PostRecv,
    PostRows,
    Program,
    Send,
    SendRows,
)

Manifest = dict[Channel, tuple[Message, ...]]


def describe_channel(channel: Channel) -> str:
    """Text for messages: ``pipeline channel 1->0``."""
    return f"{channel.lane.value} channel {channel.source}->{channel.target}"


def describe_message(message: Message | None) -> str:
    """Text for messages: ``h/0 float32[4, 8]``; ``nothing`` for None."""
    if message is None:
        return "nothing"
    return f"{message.tag} {message.dtype}{list(message.shape)}"


def manifest(programs: Sequence[Program]) -> tuple[Manifest, Manifest]:
    """Messages sent and messages posted, per channel, in program order.

    Raises:
        ScheduleError: A message is on a channel that is not this rank's, or of the wrong lane.
    """
    sent: dict[Channel, list[Message]] = {}
    posted: dict[Channel, list[Message]] = {}
    for program in programs:
        for index, instruction in enumerate(program.instructions):
            match instruction:
                case Send(message=message) | SendRows(message=message):
                    side, own, books = "sends", message.channel.source, sent
                case PostRecv(message=message) | PostRows(message=message):
                    side, own, books = "receives", message.channel.target, posted
                case _:
                    continue
            rows = isinstance(instruction, SendRows | PostRows)
            lane = Lane.ROWS if rows else Lane.PIPELINE
            channel = message.channel
            if own != program.rank or channel.source == channel.target or channel.lane is not lane:
                raise ScheduleError(
                    f"rank {program.rank}, instruction {index}: {type(instruction).__name__} "
                    f"{describe_message(message)} {side} on the {describe_channel(channel)}; "
                    f"expected another rank's {lane.value} channel with rank {program.rank} on "
                    "this side"
                )
            books.setdefault(channel, []).append(message)
    return _frozen(sent), _frozen(posted)


def _frozen(books: dict[Channel, list[Message]]) -> Manifest:
    return {channel: tuple(messages) for channel, messages in books.items()}


def check_manifest(programs: Sequence[Program]) -> None:
    """Check that each channel's sender and receiver list the same messages in the same order.

    Raises:
        ScheduleError: They do not, or the programs are not those of one group and step shape.
    """
    ranks = [program.rank for program in programs]
    if len(set(ranks)) != len(ranks):
        raise ScheduleError(f"programs of ranks {ranks}; expected each rank once")
    shapes = {program.shape for program in programs}
    if len(shapes) > 1:
        raise ScheduleError(
            f"programs of {len(shapes)} step shapes in one step; lower all devices for one shape"
        )
    sent, posted = manifest(programs)
    for channel in sorted(set(sent) | set(posted), key=_order):
        pairs = zip_longest(sent.get(channel, ()), posted.get(channel, ()))
        for index, (here, there) in enumerate(pairs):
            if here != there:
                raise ScheduleError(
                    f"message {index} of the {describe_channel(channel)}: rank {channel.source} "
                    f"sends {describe_message(here)}, rank {channel.target} posts "
                    f"{describe_message(there)}; both sides must list the same messages in the "
                    "same order"
                )


def manifest_digest(programs: Sequence[Program]) -> str:
    """Hash of every channel's messages on both sides, for comparison over ranks.

    Channels are named by device, not by rank, so that all replicas of the pipeline agree.
    """
    device = {program.rank: program.device for program in programs}
    sides = manifest(programs)
    return digest(
        [
            sorted(
                (
                    channel.lane.value,
                    device.get(channel.source, -1),
                    device.get(channel.target, -1),
                    tuple((m.tag, m.shape, m.dtype) for m in messages),
                )
                for channel, messages in side.items()
            )
            for side in sides
        ]
    )


def _order(channel: Channel) -> tuple[str, int, int]:
    return channel.lane.value, channel.source, channel.target

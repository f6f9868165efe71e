"""Progress of all ranks of a group under the weakest promise a transport gives: rendezvous.

A transfer completes only when its send has been issued, its receive has been posted and the
message before it on the same channel is complete. Sends never block the sender inside the step;
a WaitRecv, a Gather and the Encode of another device's samples block until what they need is
complete. If all ranks reach their end under
these rules, they do under any transport that is kinder (buffered sends).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from lightning_dpipe.core.errors import ScheduleError
from lightning_dpipe.core.program import (
    Channel,
    Encode,
    Gather,
    Instruction,
    Message,
    PostRecv,
    PostRows,
    Program,
    Send,
    SendRows,
    WaitRecv,
    When,
)
from lightning_dpipe.simulation.manifest import describe_channel

Ticket = tuple[Message, int]
"""A posted message and its position on its channel."""


def check_progress(programs: Sequence[Program]) -> None:
    """Run all ranks side by side until they end. Expects equal manifests (`check_manifest`).

    Raises:
        ScheduleError: Some ranks wait for ever, or a gather needs rows that nobody posted; each
            blocked rank, its instruction and the message it waits for are named.
    """
    net = _Net()
    walkers = [_Walker(program, net) for program in programs]
    # Every walker advances in each round: a list, so that `any` does not stop at the first.
    while any([walker.advance() for walker in walkers]):
        pass
    stuck = [walker.report() for walker in walkers if walker.index < len(walker.instructions)]
    if stuck:
        raise ScheduleError(
            "deadlock: "
            + "; ".join(stuck)
            + ". Post the receive or issue the send before the instruction that blocks"
        )


class _Net:
    """How many messages of each channel have been sent and posted so far.

    Channels are first in, first out on both sides, so message ``k`` is complete as soon as more
    than ``k`` have been sent and more than ``k`` have been posted.
    """

    def __init__(self) -> None:
        self.sent: Counter[Channel] = Counter()
        self.posted: Counter[Channel] = Counter()

    def complete(self, ticket: Ticket) -> bool:
        message, k = ticket
        return k < min(self.sent[message.channel], self.posted[message.channel])


class _Walker:
    """One rank: where it is, and which messages it has posted."""

    def __init__(self, program: Program, net: _Net) -> None:
        self.program = program
        self.instructions = program.instructions
        self.net = net
        self.index = 0
        self.receives: dict[tuple[int, str], Ticket] = {}
        self.rows: defaultdict[tuple[int, When], list[tuple[PostRows, Ticket]]] = defaultdict(list)

    def advance(self) -> bool:
        """Run until blocked or done; True if at least one instruction ran."""
        start = self.index
        while self.index < len(self.instructions):
            instruction = self.instructions[self.index]
            if not all(self.net.complete(ticket) for ticket in self.awaited(instruction)):
                break
            self.run(instruction)
            self.index += 1
        return self.index > start

    def run(self, instruction: Instruction) -> None:
        match instruction:
            case Send(message=message) | SendRows(message=message):
                self.net.sent[message.channel] += 1
            case PostRecv(message=message, slot=slot):
                self.receives[slot, message.tag] = self.post(message)
            case PostRows(message=message, value=value, when=when):
                self.rows[value, when].append((instruction, self.post(message)))
            case _:
                pass  # the others neither wait nor talk

    def post(self, message: Message) -> Ticket:
        ticket = (message, self.net.posted[message.channel])
        self.net.posted[message.channel] += 1
        return ticket

    def awaited(self, instruction: Instruction) -> Iterator[Ticket]:
        """Messages that must be complete before the instruction can run."""
        match instruction:
            case WaitRecv(slot=slot, tag=tag):
                yield self.receives[slot, tag]
            case Gather(value=value, parts=parts):
                for part in parts:  # rows of the step before are there already
                    if part.device != self.program.device and not self.program.shape.encoded:
                        span = (part.first, part.last)
                        yield from self.delivered(value, part.device, span, When.THIS)
            case Encode(owner=int(owner), fields=fields, when=when):
                for value in fields:
                    span = (instruction.first, instruction.last)
                    yield from self.delivered(value, owner, span, when)
            case _:
                return

    def delivered(
        self, value: int, device: int, span: tuple[int, int], when: When
    ) -> Iterator[Ticket]:
        """The row messages that bring samples `span` of a device's local batch."""
        need, last = span
        for post, ticket in sorted(self.rows[value, when], key=lambda entry: entry[0].first):
            if post.device == device and post.first < last and span[0] < post.last:
                yield ticket
                if post.first <= need:
                    need = max(need, post.last)
        if need < last:
            verb = "gathers" if when is When.THIS else "encodes"
            raise ScheduleError(
                f"rank {self.program.rank}, instruction {self.index}: {verb} samples "
                f"[{span[0]}, {last}) of value {value} from device {device}, but no "
                f"receive is posted for sample {need}; post its rows first"
            )

    def report(self) -> str:
        """Where this rank stands and what is missing for it to go on."""
        instruction = self.instructions[self.index]
        missing = [t for t in self.awaited(instruction) if not self.net.complete(t)]
        message, k = missing[0]
        channel = message.channel
        return (
            f"rank {self.program.rank} blocks at instruction {self.index} "
            f"({type(instruction).__name__}) on {message.tag}, message {k} of the "
            f"{describe_channel(channel)}, where {self.net.sent[channel]} are sent and "
            f"{self.net.posted[channel]} posted"
        )

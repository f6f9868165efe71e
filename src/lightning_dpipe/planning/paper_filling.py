"""DiffusionPipe's own greedy bubble filling, as ``fill="paper"``: the baseline of ours.

In:     a Plan without fills, its Schedule and Profile.
Out:    Fill tuples that cover all frozen work; what no bubble took follows the last op.
Source: DiffusionPipe (arXiv 2405.01248), section 5. Bubbles of the unfilled pipeline are taken in
        time order, those under 10 ms ignored. In each, every choice of next full-batch layers of
        the ready components that fits is tried, with one partial-batch layer of a listed size
        behind it, and the longest kept. What is left of that layer is its component's next one.
Ours differs in that a device only encodes its own samples: sizes are per device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_dpipe.core.fleet import device_profiles
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.backlog import FrozenCosts, Piece
from lightning_dpipe.planning.bubbles import bubbles
from lightning_dpipe.simulation.simulate import simulate, steady_shape

MIN_BUBBLE_US = 10_000
PARTIAL_SAMPLES = (4, 8, 12, 16, 24, 32, 48, 64, 96)


def paper_fill(
    plan: Plan,
    schedule: Schedule,
    profile: Profile,
    *,
    self_conditioned: bool = False,
    min_bubble_us: int = MIN_BUBBLE_US,
) -> tuple[Fill, ...]:
    """Place all frozen work of the next batch, bubble by bubble.

    Args:
        plan: Stages, devices and batch; its own fills are ignored.
        schedule: Order of ops per device, of the variant that `self_conditioned` names.
        profile: Costs.
        self_conditioned: Marks the fills as those of the schedule with S ops.
        min_bubble_us: Shorter bubbles are not filled.

    Returns:
        Fills sorted by device, each device's in run order.
    """
    work = FrozenCosts.of(profile, samples=plan.batch_size)
    shape = replace(steady_shape(plan, schedule), encoded=True, next_sizes=None)
    timeline = simulate(replace(plan, fills=()), schedule, profile, shape=shape)
    chains = [
        _Chains(FrozenCosts.of(own, samples=plan.batch_size))
        for own in device_profiles(plan, profile)
    ]
    fills: list[list[Fill]] = [[] for _ in chains]
    for bubble in sorted(bubbles(timeline), key=lambda b: (b.start_us, b.device)):
        if bubble.length_us >= min_bubble_us:
            pieces = chains[bubble.device].take_longest(bubble.length_us)
            fills[bubble.device] += work.fills(pieces, bubble.device, bubble.after)
    for device, order in enumerate(schedule.orders):
        after = order[-1] if order else None
        fills[device] += work.fills(chains[device].take_all(), device, after)
    return tuple(
        replace(fill, self_conditioned=self_conditioned) for mine in fills for fill in mine
    )


class _Chains:
    """What one device still has to encode: per component a chain of layers, by position."""

    def __init__(self, work: FrozenCosts) -> None:
        self.work = work
        self.done = [0] * len(work.layers)
        self.chains: dict[str, list[int]] = {}
        for position, layer in enumerate(work.layers):
            self.chains.setdefault(layer.component, []).append(position)

    def take_longest(self, length_us: int) -> list[Piece]:
        """The candidate that fills most of a bubble; ties go to the one tried first."""
        best: list[Piece] = []
        best_us = 0
        ready = self._ready()
        for full, used_us in self._full(ready, length_us):
            partial = self._partial(ready, full, length_us - used_us)
            pieces = full if partial is None else [*full, partial]
            total_us = sum(self.work.cost_us(p.layer, p.last - p.first) for p in pieces)
            if total_us > best_us:
                best, best_us = pieces, total_us
        self._take(best)
        return best

    def take_all(self) -> list[Piece]:
        """Everything left, in run order."""
        b = self.work.samples
        pieces = [Piece(i, done, b) for i, done in enumerate(self.done) if done < b]
        self._take(pieces)
        return pieces

    def _ready(self) -> list[list[Piece]]:
        """Per ready component: the rest of its chain, its first layer perhaps begun."""
        b, found = self.work.samples, []
        for chain in self.chains.values():
            rest = [Piece(i, self.done[i], b) for i in chain if self.done[i] < b]
            outside = {p for i in chain for p in self.work.layers[i].before if p not in chain}
            if rest and all(self.done[p] == b for p in outside):
                found.append(rest)
        return found

    def _full(
        self, ready: Sequence[Sequence[Piece]], length_us: int
    ) -> Iterator[tuple[list[Piece], int]]:
        """Every number of next layers of each ready component that fits together."""
        if not ready:
            yield [], 0
            return
        taken: list[Piece] = []
        used_us = 0
        for piece in (None, *ready[0]):
            if piece is not None:
                used_us += self.work.cost_us(piece.layer, piece.last - piece.first)
                if used_us > length_us:
                    return
                taken.append(piece)
            for rest, rest_us in self._full(ready[1:], length_us - used_us):
                yield [*taken, *rest], used_us + rest_us

    def _partial(
        self, ready: Sequence[Sequence[Piece]], full: Sequence[Piece], room_us: int
    ) -> Piece | None:
        """The longest listed partial batch of a layer that comes next."""
        chosen = set(full)
        best: Piece | None = None
        best_us = 0
        for rest in ready:
            piece = next((p for p in rest if p not in chosen), None)
            if piece is None:
                continue
            for samples in PARTIAL_SAMPLES:
                cost_us = self.work.cost_us(piece.layer, samples)
                if samples < piece.last - piece.first and best_us < cost_us <= room_us:
                    best, best_us = replace(piece, last=piece.first + samples), cost_us
        return best

    def _take(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.done[piece.layer] = piece.last

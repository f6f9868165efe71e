"""Candidates of all configurations of a search, the most promising first.

In:     configurations, each with a lower bound and its chains of stages in order of theirs.
Out:    (configuration, stages), and a bound on all that is still to come.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.pipelines import Chains
from lightning_dpipe.planning.stage_costs import Cutting


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One way to cut the batch into micro-batches and the backbone into a number of stages.

    `bound_us` holds for all its chains; `chains` yields those below a limit that may fall.
    `plan` makes a chain a plan, else `auto.plan_of`. `groups` are the ranks of its pipelines, if
    not consecutive ones; `profile` has the links that they see, if the network does not say.
    """

    cutting: Cutting
    bound_us: float
    chains: Callable[[Callable[[], float]], Chains]
    plan: Callable[[Plan, Cutting, tuple[Stage, ...]], Plan] | None = None
    groups: tuple[tuple[int, ...], ...] | None = None
    profile: Profile | None = None


class Rounds:
    """Chains of all configurations, in rounds: each round takes the next one of every configuration
    that could still win, the least bound first. Nothing at or above `limit_us` could.

    Data parallelism comes before all rounds: the leading configurations of one device are tried
    before more are asked for, so that those which they rule out need not be made."""

    def __init__(self, configs: Iterable[Config]) -> None:
        self.limit_us = self._left_out_us = float("inf")
        self._heap: list[_Entry] = []
        self._tickets = itertools.count()
        self._to_come = iter(configs)
        self._all_known = False

    @property
    def bound_us(self) -> float:
        """Nothing that is still to come, nor what was left out, ends the iteration earlier."""
        if not self._all_known:
            return 0.0
        coming_us = min((entry[1] for entry in self._heap), default=self.limit_us)
        return min(coming_us, self._left_out_us, self.limit_us)

    def __iter__(self) -> Iterator[tuple[Config, tuple[Stage, ...]]]:
        others = self._add_alone()
        yield from self._rounds(before=0)
        for config in others:
            self._add(config, turn=0)
        self._all_known = True
        yield from self._rounds()

    def _add_alone(self) -> Iterator[Config]:
        """Enter the leading configurations of one device; returns all others."""
        for config in self._to_come:
            if config.cutting.num_devices > 1:
                return itertools.chain([config], self._to_come)
            self._add(config, turn=-1)
        return iter(())

    def _add(self, config: Config, turn: int) -> None:
        if config.bound_us < float("inf"):
            chains = config.chains(lambda: self.limit_us)
            entry = (turn, config.bound_us, next(self._tickets), config, chains, None)
            heapq.heappush(self._heap, entry)

    def _rounds(self, before: float = float("inf")) -> Iterator[tuple[Config, tuple[Stage, ...]]]:
        """The rounds before one."""
        while self._heap and self._heap[0][0] < before:
            turn, bound_us, ticket, config, chains, stages = heapq.heappop(self._heap)
            if bound_us >= self.limit_us:
                continue
            if stages is None:
                bound_us, stages = next(chains, (self.limit_us, ()))
                if not stages:
                    self._left_out_us = min(self._left_out_us, bound_us)
                    continue
            self._push(turn + 1, ticket, config, chains)
            yield config, stages

    def _push(self, turn: int, ticket: int, config: Config, chains: Chains) -> None:
        following = next(chains, None)
        if following is not None and not following[1]:
            self._left_out_us = min(self._left_out_us, following[0])
        elif following is not None:
            bound_us, stages = following
            heapq.heappush(self._heap, (turn, bound_us, ticket, config, chains, stages))


_Entry = tuple[int, float, int, Config, Chains, tuple[Stage, ...] | None]
"""Round, bound, a running number, and the next chain (None: not asked for yet)."""

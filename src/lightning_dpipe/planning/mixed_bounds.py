"""Lower bounds on pipelines whose stages are held by teams of several kinds of devices.

In:     the costs of all stages on each kind, the teams, and how a group cuts its batch.
Out:    the bounds of `bounds.ChainBounds`, and its tables, over teams.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_dpipe.planning.bounds import ChainBounds, Terms
from lightning_dpipe.planning.stage_costs import Array, BackboneCosts, Cutting, StageTable
from lightning_dpipe.planning.teams import Team

Flags = NDArray[np.bool_]


class MixedBounds(ChainBounds):
    """Bounds of all chains of teams for one cutting of the batch.

    `replicas` are indices of `teams`; numbers of devices are codes: how many are left of each kind,
    as digits.

    What a stage sends first may come from its fastest replica, and its last backward may be that of
    its fastest: between stages the least of a team counts, for its own work the most.
    """

    def __init__(
        self,
        kinds: Sequence[BackboneCosts],
        counts: tuple[int, ...],
        teams: Sequence[Team],
        cutting: Cutting,
        *,
        max_stages: int,
        frozen_us: Sequence[int],
        hidden: bool,
    ) -> None:
        least_us = min(frozen_us)
        super().__init__(
            kinds[0], cutting, max_stages=max_stages, frozen_us=least_us, hidden=hidden
        )
        self.kinds, self.counts, self.teams = kinds, counts, teams
        # What a device must encode beyond what shifts everything.
        self._own_us = [us if hidden else us - least_us for us in frozen_us]
        self._hops = kinds[0].hops_us(replace(cutting, sizes=(1,)), 1)
        self._digits = [math.prod(n + 1 for n in counts[:k]) for k in range(len(counts))]
        self._codes = [self._code(team.counts) for team in teams]
        self._left = {self._code(v): v for v in itertools.product(*(range(n + 1) for n in counts))}
        self._choices: dict[tuple[int, int], list[int]] = {}

    def _code(self, counts: Sequence[int]) -> int:
        return sum(map(math.prod, zip(counts, self._digits, strict=True)))

    @property
    def all_devices(self) -> int:
        """Code of all devices."""
        return self._code(self.counts)

    def device_choices(self, num_stages: int) -> Sequence[int]:
        """Codes of what the last `num_stages` stages may have together."""
        return [code for code, left in self._left.items() if sum(left) >= num_stages]

    def behind(self, num_devices: int, replicas: int) -> int:
        """Code of what a team leaves."""
        return num_devices - self._codes[replicas]

    def replica_choices(self, num_stages: int, num_devices: int) -> Sequence[int]:
        """Teams the first of `num_stages` stages may have, the others keeping a device each."""
        key = (num_stages, num_devices)
        if key not in self._choices:
            left = self._left[num_devices]
            most = sum(left) - (num_stages - 1)
            self._choices[key] = [
                i
                for i, team in enumerate(self.teams)
                if (team.size == most if num_stages == 1 else team.size <= most)
                and all(n <= have for n, have in zip(team.counts, left, strict=True))
            ]
        return self._choices[key]

    def _make_terms(self, replicas: int, from_back: int) -> tuple[StageTable, Terms]:
        team, sizes = self.teams[replicas], self.cutting.sizes
        by_size = {size: team.split(size) for size in set(sizes)}
        members = {
            (kind, tuple(by_size[size][i] for size in sizes)) for i, kind in enumerate(team.kinds)
        }
        again, allowed = self._memory(members, from_back)
        found = [self._member(kind, rows, again) for kind, rows in sorted(members)]
        works, firsts, lasts, steps, loads = (list(x) for x in zip(*found, strict=True))
        sync = self.kinds[0].sync(team.size * self.cutting.num_groups)
        allowed &= self.kinds[0].sequential
        infinite = np.where(allowed, 0.0, np.inf)
        # Without a reduction nobody waits for the slowest before the optimizer.
        least: Array = np.minimum.reduce(steps)
        most: Array = np.maximum.reduce(steps)
        step: Array = np.where(sync > 0, most, least)
        table = StageTable(
            work=np.maximum.reduce(works) + infinite,
            first=np.minimum.reduce(firsts),
            last=np.minimum.reduce(lasts),
            sync=sync,
            step=step,
            recompute=again,
            total=np.zeros_like(sync),  # frozen work stays where it is: loads say more
        )
        return table, self._terms(table, np.maximum.reduce(loads) + infinite)

    def _member(
        self, kind: int, rows: Sequence[int], again: Flags
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Work, first forward, last backward, optimizer step and load of one device."""
        costs = self.kinds[kind]
        shares = {r: rows.count(r) for r in set(rows)}
        forward = sum(n * costs.at("forward_us", r) for r, n in shares.items())
        backward = sum(n * costs.at("backward_us", r) for r, n in shares.items())
        forwards = 2 if self.cutting.self_conditioned else 1
        work = forwards * forward + backward + np.where(again, forward, 0.0)
        first = costs.at("forward_us", rows[0])
        recomputed = np.where(again, costs.at("forward_us", rows[-1]), 0.0)
        last = costs.at("backward_us", rows[-1]) + recomputed
        return work, first, last, costs.step, work + costs.step + self._own_us[kind]

    def _memory(
        self, members: set[tuple[int, tuple[int, ...]]], from_back: int
    ) -> tuple[Flags, Flags]:
        """Where the stage must recompute for the sake of any device, and where it fits on all."""
        n = self.costs.num_layers + 1
        again, allowed = np.zeros((n, n), dtype=bool), np.ones((n, n), dtype=bool)
        held = []
        for kind, rows in members:
            costs = self.kinds[kind]
            limit = costs.profile.memory_bytes
            if limit is not None:
                in_flight = rows[: self.cutting.in_flight(from_back)]
                left = limit - costs.frozen_bytes - costs.resident_bytes
                held.append((left, *costs.held_bytes_of(in_flight)))
        for left, plain, _ in held:
            again |= plain > left
        for left, plain, recomputing in held:
            allowed &= np.where(again, recomputing, plain) <= left
        return again, allowed

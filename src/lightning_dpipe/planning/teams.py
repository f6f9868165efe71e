"""Teams of devices of several kinds that hold one stage together, and how they share its rows.

In:     devices of each kind, the rows of a micro-batch, and what rows cost on each kind.
Out:    every team that fits, each with the ways to share rows that are worth a try.

Devices of one kind get equal shares. Among kinds all splits are tried where they are few; else
those that end all devices together, with none, some or all of their frozen work counted: a slow
device that has bubbles for its encoders takes more rows than one that must encode on top.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dpipe.core.plan import split_by_shares, split_sizes


@dataclass(frozen=True, slots=True)
class Team:
    """`counts[k]` devices of kind k, which have `rows[k]` rows of the largest micro-batch."""

    counts: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def size(self) -> int:
        """All devices of the team."""
        return sum(self.counts)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each device, in the order of the stage's devices."""
        return tuple(k for k, n in enumerate(self.counts) for _ in range(n))

    @property
    def shares(self) -> tuple[int, ...]:
        """The stage's shares, empty where they are equal."""
        if sum(n > 0 for n in self.counts) == 1:
            return ()
        parts = zip(self.rows, self.counts, strict=True)
        shares = tuple(x for rows, n in parts if n for x in split_sizes(rows, n))
        return () if len(set(shares)) == 1 else shares

    def split(self, rows: int) -> tuple[int, ...]:
        """Rows of each device, as `core.plan.Stage.split` has it."""
        return split_by_shares(rows, self.shares or (1,) * self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """`work_us[k][r]`: all ops of the whole backbone on a device of kind k with r rows of each
    micro-batch. `frozen_us[k]`: the device's own frozen work, which takes no part in the split."""

    work_us: tuple[tuple[float, ...], ...]
    frozen_us: tuple[int, ...]

    def portion(self, counts: Sequence[int], everyone: Sequence[int]) -> float:
        """About the part of the backbone that a team has when all devices end together."""
        speeds = [1 / max(times[-1], 1) for times in self.work_us]
        return sum(map(math.prod, zip(speeds, counts, strict=True))) / sum(
            map(math.prod, zip(speeds, everyone, strict=True))
        )


def teams_of(
    everyone: Sequence[int],
    sizes: Sequence[int],
    costs: RowCosts,
    most: int | None,
    *,
    everyone_only: bool = False,
) -> list[Team]:
    """All teams that can be picked from `everyone`.

    Args:
        everyone: Devices of each kind.
        sizes: Rows of each micro-batch, largest first: no team has more devices than the last has.
        costs: Of rows on each kind.
        most: Splits to try for each team; None: all.
        everyone_only: Leave out teams that do not need all devices.
    """
    found = []
    for counts in itertools.product(*(range(n * everyone_only, n + 1) for n in everyone)):
        if 0 < sum(counts) <= sizes[-1]:
            splits = splits_of(counts, sizes[0], costs, costs.portion(counts, everyone), most)
            found += [Team(counts, split) for split in splits]
    return found


def splits_of(
    counts: Sequence[int], rows: int, costs: RowCosts, portion: float, most: int | None
) -> list[tuple[int, ...]]:
    """Ways to split rows among the kinds of a team, each device getting at least one."""
    present = sum(n > 0 for n in counts)
    if most is None or math.comb(rows - sum(counts) + present - 1, present - 1) <= most:
        return list(_all_splits(counts, rows))
    weights = (i / max(1, most - 1) for i in range(most))
    return list(dict.fromkeys(_balanced(counts, rows, costs, w / portion) for w in weights))


def _all_splits(counts: Sequence[int], rows: int) -> Iterator[tuple[int, ...]]:
    if not counts:
        if rows == 0:
            yield ()
        return
    others = sum(counts[1:])
    for first in range(counts[0], rows - others + 1) if counts[0] else (0,):
        for rest in _all_splits(counts[1:], rows - first):
            yield (first, *rest)


def _balanced(
    counts: Sequence[int], rows: int, costs: RowCosts, frozen_weight: float
) -> tuple[int, ...]:
    """Row after row to the kind that ends first with it: no split has an earlier last end."""
    split = list(counts)
    for _ in range(rows - sum(counts)):
        split[_first_done(counts, split, costs, frozen_weight)] += 1
    return tuple(split)


def _first_done(
    counts: Sequence[int], split: Sequence[int], costs: RowCosts, frozen_weight: float
) -> int:
    def end_us(kind: int) -> float:
        share = -(-(split[kind] + 1) // counts[kind])
        return costs.work_us[kind][share] + frozen_weight * costs.frozen_us[kind]

    return min((k for k, n in enumerate(counts) if n), key=end_us)

"""Teams and their splits of rows."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.planning.teams import RowCosts, Team, splits_of, teams_of


def linear(rates: tuple[int, ...], rows: int, frozen_us: tuple[int, ...]) -> RowCosts:
    work = tuple(tuple(float(rate * r) for r in range(rows + 1)) for rate in rates)
    return RowCosts(work_us=work, frozen_us=frozen_us)


@given(
    counts=st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any),
    more=st.integers(0, 12),
    rates=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    frozen_us=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_the_last_of_few_splits_ends_no_later_than_any_other(counts, more, rates, frozen_us):
    rows = sum(counts) + more
    costs = linear(rates, rows, frozen_us)

    def end_us(split: tuple[int, ...], weight: float) -> float:
        return max(
            rates[k] * -(-split[k] // n) + weight * frozen_us[k] for k, n in enumerate(counts) if n
        )

    every = splits_of(counts, rows, costs, 1.0, None)
    assert len(set(every)) == len(every)
    wanted = [
        split
        for split in itertools.product(range(rows + 1), repeat=2)
        if sum(split) == rows
        and all((x >= n) if n else x == 0 for x, n in zip(split, counts, strict=True))
    ]
    assert sorted(every) == sorted(wanted)
    few = splits_of(counts, rows, costs, 1.0, 2)
    assert set(few) <= set(every)
    for weight in (0.0, 1.0):  # frozen work left out, and counted in full
        assert min(end_us(s, weight) for s in few) == min(end_us(s, weight) for s in every)


def test_devices_of_one_kind_share_equally_and_teams_say_who_is_who() -> None:
    team = Team((2, 1), (3, 5))
    assert (team.size, team.kinds, team.shares) == (3, (0, 0, 1), (2, 1, 5))
    assert team.split(8) == (2, 1, 5)
    assert Team((3, 0), (8, 0)).shares == Team((1, 1), (4, 4)).shares == ()
    assert Team((3, 0), (8, 0)).split(8) == (3, 3, 2)


def test_no_team_has_more_devices_than_the_smallest_microbatch_has_rows() -> None:
    costs = linear((1, 2), 3, (0, 0))
    found = teams_of((2, 2), (3, 2), costs, None)
    assert {team.counts for team in found} == {(0, 1), (1, 0), (1, 1), (0, 2), (2, 0)}
    assert teams_of((2, 2), (3, 2), costs, None, everyone_only=True) == []
    assert {t.counts for t in teams_of((1, 1), (3, 2), costs, 1, everyone_only=True)} == {(1, 1)}

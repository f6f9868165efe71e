"""A quick search says nothing, a long one a line each two seconds."""

from lightning_dpipe.strategy.patience import patient


def test_only_a_search_that_takes_long_says_how_it_gets_on() -> None:
    said: list[str] = []
    now_s = 0.0
    progress = patient(said.append, wait_s=2.0, now_s=lambda: now_s)
    for tried in range(1, 8):
        now_s += 0.9
        progress(tried, 2000.0, 1500.0)
    assert [line.split()[1] for line in said] == ["3", "6"]
    assert "best iteration 2.00 ms, none can end before 1.50 ms" in said[0]

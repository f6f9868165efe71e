"""Orders of units: complete, causal, and as long as the closed forms say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.sampling.units import Unit, list_units, successors, timeline


def patched(steps: int, patches: int, warmup: int, groups: int = 1) -> tuple[Unit, ...]:
    return list_units(num_steps=steps, num_patches=patches, warmup=warmup, groups=groups)


def whole(steps: int, groups: int) -> tuple[Unit, ...]:
    return list_units(num_steps=steps, num_patches=None, warmup=1, groups=groups)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 5),
    patches=st.integers(1, 6),
    warmup=st.integers(1, 7),
    groups=st.integers(1, 3),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_every_op_runs_once_after_what_it_needs(
    steps: int, patches: int, warmup: int, groups: int, owners: list[int]
) -> None:
    units = patched(steps, patches, warmup, groups)
    spans = timeline(units, owners).spans
    at = {(s.op.unit.index, s.op.stage): s for s in spans}
    assert len(at) == len(spans) == len(units) * len(owners)
    rows = {u.index: set(range(patches)) if u.patch is None else {u.patch} for u in units}
    for span in spans:
        unit, stage = span.op.unit, span.op.stage
        assert span.rank == owners[stage]
        if stage:
            assert at[unit.index, stage - 1].end <= span.start
            continue
        needed = rows[unit.index] if unit.step else set()
        for before in units:
            same = (before.step, before.group) == (unit.step - 1, unit.group)
            if same and rows[before.index] & needed:
                assert at[before.index, len(owners) - 1].end <= span.start
    for order in timeline(units, owners).orders().values():
        for stage in range(len(owners)):
            indices = [op.unit.index for op in order if op.stage == stage]
            assert indices == sorted(indices)
    fed = [u.index for later in successors(units).values() for u in later]
    assert sorted(fed) == [u.index for u in units if u.step > 0]


@pytest.mark.parametrize(("steps", "patches", "stages"), [(20, 4, 4), (20, 8, 4), (7, 5, 2)])
def test_with_enough_patches_the_paper_s_efficiency_is_reached(
    steps: int, patches: int, stages: int
) -> None:
    # After w whole images: P T / (P T + N - 1) of the time, arXiv 2405.14430 section 4.1.
    drawn = timeline(patched(steps + 1, patches, 1), range(stages))
    assert drawn.end == pytest.approx(stages + steps + (stages - 1) / patches)


def test_with_fewer_patches_than_stages_the_ring_is_the_limit() -> None:
    drawn = timeline(patched(11, 2, 1), range(4))
    assert drawn.end == pytest.approx(4 + 10 * 4 / 2 + 1 / 2)


def test_interleaved_images_fill_exact_sampling_s_idle_stages() -> None:
    alone, four = timeline(whole(10, 1), range(4)), timeline(whole(10, 4), range(4))
    assert alone.end == pytest.approx(40)
    assert four.end == pytest.approx(43)
    assert four.useful_ratio() == pytest.approx(40 / 43)
    assert [line.count(".") for line in four.chart(86).splitlines()] == [6, 6, 6, 6]


def test_the_chart_shows_whole_images_then_patches() -> None:
    assert timeline(patched(3, 2, 1), (0, 1)).chart(18).splitlines() == [
        "rank 0 |WWWW....00110011..|",
        "rank 1 |....WWWW..00110011|",
    ]

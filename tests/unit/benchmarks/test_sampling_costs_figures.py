"""The one fitted figure is fitted, and what follows from it is as near the paper's as is said."""

import pytest

from benchmarks.common import Report
from benchmarks.sampling_costs import (
    FITTED,
    PAPER,
    fitted,
    hardware_of,
    memories,
    over_sequence,
    with_share,
)
from lightning_dpipe.sampling.hardware import NVLINK, PCIE

MISSED = "pixart_2048"
"""1.20x for the paper's 1.55x: no share of the link gives both its 1024 and its 2048 px."""


@pytest.mark.parametrize("name", PAPER)
def test_ratios_of_the_paper(name: str) -> None:
    ratio = over_sequence(name, with_share(PCIE.share))[2]
    error = abs(ratio / PAPER[name][2] - 1)
    if name == FITTED:
        assert error < 0.001
    elif name == MISSED:
        assert 0.15 < error < 0.25
    else:
        assert error <= 0.15


def test_no_share_of_the_link_gives_all_figures_of_pixart() -> None:
    for share in (0.3, 0.4, 0.5, 0.6, 0.75, 1.0):
        made = with_share(share)
        errors = [
            abs(over_sequence(name, made)[2] / PAPER[name][2] - 1) for name in (FITTED, MISSED)
        ]
        assert max(errors) > 0.1


def test_fitting_finds_rising_and_falling_targets() -> None:
    assert fitted(lambda x: x * x, 2, 0, 10) == pytest.approx(2**0.5, abs=1e-5)
    assert fitted(lambda x: -x, -3, 0, 10) == pytest.approx(3, abs=1e-5)


def test_memory_bars_hold() -> None:
    report = Report("memory")
    memories(report)
    assert len(report.bars) == 3
    assert all(bar["holds"] for bar in report.bars.values())


def test_clusters_are_those_of_the_files() -> None:
    assert hardware_of("p4de_8x8", NVLINK, nodes=1).cluster.world_size == 8
    assert hardware_of("l40_2x8", PCIE).cluster.world_size == 16

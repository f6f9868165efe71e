"""Sampling over stages: exact mode is the library's, stale mode is the one-process oracle's."""

from typing import Any

import pytest
import torch

from sampled import CASES, STEPS, Case, draw, model_of
from stale import stale

BOTH = [
    pytest.param(case, make, id=f"{case.name}-{make.__name__}")
    for case in CASES.values()
    for make in case.schedulers
]
RANKS = (1, 2, 4)


@pytest.mark.parametrize(("case", "make"), BOTH)
def test_exact_is_bit_identical_to_the_library(case: Case, make: Any) -> None:
    model, request = model_of(case.name), case.request()
    expected = case.library(model, make(), request, {})
    assert expected.isfinite().all()
    for ranks in RANKS:
        options = case.options(make(), request)
        drawn = draw(model, make(), request, ranks=ranks, options=options)
        assert torch.equal(drawn, expected), ranks


@pytest.mark.parametrize(("case", "make"), BOTH)
def test_stale_is_bit_identical_to_the_oracle_for_any_number_of_ranks(
    case: Case, make: Any
) -> None:
    model, request = model_of(case.name), case.request(batch=2)
    options = case.options(make(), request)
    exact = draw(model, make(), request, options=options)
    for cuts, warmup in (((0, 2, 6), 1), ((0, 1, 2, 4, 5, 6), 2)):
        expected = stale(
            case.name, model, make(), request, cuts=cuts, warmup=warmup, options=options
        )
        assert not torch.equal(expected, exact)
        for ranks in RANKS:
            drawn = draw(
                model, make(), request, ranks=ranks, options=options,
                mode="pipefusion", patches=cuts, warmup=warmup,
            )  # fmt: skip
            assert torch.equal(drawn, expected), (cuts, ranks)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_patch_or_warm_up_alone_is_exact(case: Case) -> None:
    model, request, make = model_of(case.name), case.request(), case.schedulers[1]
    options = case.options(make(), request)
    exact = draw(model, make(), request, options=options)
    for plan in ({"patches": 1}, {"patches": 3, "warmup": STEPS}, {"patches": 3, "warmup": 99}):
        drawn = draw(model, make(), request, ranks=2, options=options, mode="pipefusion", **plan)
        assert torch.equal(drawn, exact), plan

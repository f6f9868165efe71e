"""Sampling over real processes: gloo's sends are rendezvous, so this is the proof of no deadlock."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.sampling.plan import SamplingPlan
from lightning_dpipe.sampling.sampler import sample
from ranks import run_ranks
from sampled import CASES, drawn, model_of, options_of, stages_of

pytestmark = pytest.mark.dist

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"groups": 2},
    {"mode": "pipefusion", "patches": 1},
    {"mode": "pipefusion", "patches": 2},
    {"mode": "pipefusion", "patches": (0, 1, 2, 4, 5, 6), "groups": 2},
)


def draw_all(rank: int) -> list[Tensor | None]:
    transport = DistTransport(torch.device("cpu"))
    found = []
    for name in ("pixart", "sd3"):
        case, model = CASES[name], model_of(name)
        request = case.request(batch=2)
        for plan in PLANS:
            made = SamplingPlan(stages=stages_of(model, request, 2), **plan)
            found.append(
                sample(
                    model, case.schedulers[0](), request, made, transport=transport, rank=rank,
                    options=options_of(case, request),
                )
            )  # fmt: skip
    transport.close()
    return found


def test_two_processes_draw_what_one_draws_with_fewer_as_many_and_more_patches() -> None:
    first, last = run_ranks(draw_all, 2, timeout_s=120.0)
    assert first == [None] * 2 * len(PLANS)
    asked = [(name, plan) for name in ("pixart", "sd3") for plan in PLANS]
    for (name, plan), latents in zip(asked, last, strict=True):
        case = CASES[name]
        assert torch.equal(latents, drawn(case, case.request(batch=2), **plan)), (name, plan)

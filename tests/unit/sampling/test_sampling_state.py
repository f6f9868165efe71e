"""What is known to go wrong when patches are sampled over stages: what a call leaves behind.

Elsewhere: bit-identity, uneven patches, batch 2, SD3.5's second attention (test_sampler), solvers,
noise and step indices (test_solver), legal cuts and defaults (test_patches, test_sampling_plan),
ranks (test_sampling_ranks), work done (test_sampling_work), processes (test_dist_sampling).
Not offered, so not tested: guidance branches on different ranks (they are one batch, else the
result would not be bit-identical), a second parallel axis. Sub-groups bound to a device need a
GPU; channels are the training engine's, which the GPU tests cover.
"""

import copy
import dataclasses
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dpipe.core.errors import (
    UnsupportedError,
)
from sampled import (
    CASES,
    STALE,
    STEPS,
    Case,
    draw,
    drawn,
    model_of,
    options_of,
    shifted_euler,
    sites,
)
from stale import stale

FAMILIES = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@FAMILIES
def test_calls_of_other_images_sizes_and_lengths_leave_no_trace(case: Case) -> None:
    first = case.request()
    size = (16, 16) if case.name == "dit" else (8, 16)
    alone = drawn(case, first, **STALE)
    drawn(case, case.request(seed=9, batch=2), **STALE)
    drawn(case, case.request(seed=8, steps=2), **{**STALE, "warmup": 4})  # clamped, for once
    other = drawn(case, case.request(seed=7, size=size), **STALE)
    assert other.shape[2:] == size
    assert torch.equal(drawn(case, first, **STALE), alone)


@FAMILIES
def test_another_resolution_equals_the_oracle(case: Case) -> None:
    request = case.request(size=(16, 16) if case.name == "dit" else (8, 16))
    cuts = (0, 3, request.noise.shape[2] // 2)
    expected = stale(
        case.name, model_of(case.name), case.schedulers[0](), request, cuts=cuts, warmup=1,
        options=options_of(case, request),
    )  # fmt: skip
    assert torch.equal(drawn(case, request, ranks=2, **{**STALE, "patches": cuts}), expected)


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("name", ["pixart", "sd3"])
def test_batch_two_with_and_without_guidance_is_the_library_s(name: str, guided: bool) -> None:
    case = CASES[name]
    request = case.request(batch=2, guided=guided)
    expected = case.library(model_of(name), case.schedulers[0](), request, {})
    assert torch.equal(drawn(case, request, ranks=2), expected)
    assert torch.equal(drawn(case, request, ranks=2, **{**STALE, "patches": 1}), expected)


@FAMILIES
def test_interleaved_groups_are_what_each_would_be_alone(case: Case) -> None:
    request = case.request(batch=3)
    for plan in ({}, STALE):
        both = drawn(case, request, ranks=2, groups=2, **plan)
        for rows in (slice(0, 2), slice(2, 3)):
            assert torch.equal(both[rows], drawn(case, part_of(request, rows), **plan))


def part_of(request: Any, rows: slice) -> Any:
    guidance = request.guidance
    if guidance is not None:
        other = {k: v[rows] for k, v in guidance.unconditional.items()}
        guidance = dataclasses.replace(guidance, unconditional=other)
    return dataclasses.replace(
        request,
        noise=request.noise[rows],
        conditions={k: v[rows] for k, v in request.conditions.items()},
        guidance=guidance,
    )


@pytest.mark.parametrize("words", [1, 3, 9])
def test_flux_takes_any_length_of_text_on_four_ranks_with_two_patches(words: int) -> None:
    case = CASES["flux"]
    request = case.request(words=words)
    expected = stale(
        "flux", model_of("flux"), shifted_euler(), request, cuts=(0, 3, 6), warmup=1,
        options=options_of(case, request),
    )  # fmt: skip
    assert torch.equal(drawn(case, request, ranks=4, **{**STALE, "patches": 2}), expected)


@FAMILIES
def test_nothing_outlives_a_call_and_processors_modes_and_names_are_as_before(case: Case) -> None:
    model, request = model_of(case.name), case.request()
    before = [m.processor for m in sites(model)]
    names = [*model.state_dict()]
    model.train()
    seen: list[Any] = []

    def look(step: int, latents: Tensor) -> None:
        assert not any(m.training for m in model.transformer_blocks[-1].modules())
        assert [*model.state_dict()] == names
        for module in sites(model):
            for pair in getattr(module.processor, "pairs", {}).values():
                seen.extend(weakref.ref(tensor) for tensor in pair)

    drawn(case, request, on_step=look, **STALE)
    assert len(seen) >= STEPS * len(before)
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    assert all(m.processor is p for m, p in zip(sites(model), before, strict=True))
    assert all(m.training for m in model.modules())
    model.eval()


@FAMILIES
def test_autocast_around_a_call_changes_nothing(case: Case) -> None:
    request = case.request()
    expected = drawn(case, request, **STALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(drawn(case, request, **STALE), expected)


@FAMILIES
def test_half_precision_weights_are_the_library_s_and_take_float_latents_too(case: Case) -> None:
    model, request = copy.deepcopy(model_of(case.name)).bfloat16(), halved(case.request())
    make, options = case.schedulers[0], options_of(case, request)
    expected = case.library(model, make(), request, {})
    assert expected.dtype is torch.bfloat16
    assert torch.equal(draw(model, make(), request, ranks=2, options=options), expected)
    stale_one = draw(model, make(), request, options=options, **STALE)
    assert torch.equal(draw(model, make(), request, ranks=3, options=options, **STALE), stale_one)
    finer = dataclasses.replace(request, noise=request.noise.float())
    found = draw(model, make(), finer, ranks=2, options=options, **STALE)
    assert found.dtype is torch.float32
    assert found.isfinite().all()


def halved(request: Any) -> Any:
    """The request with its floats in bfloat16."""

    def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}

    guidance = request.guidance
    if guidance is not None:
        guidance = dataclasses.replace(guidance, unconditional=half(guidance.unconditional))
    return dataclasses.replace(
        request,
        noise=request.noise.bfloat16(),
        conditions=half(request.conditions),
        guidance=guidance,
    )


def test_on_step_is_called_once_a_step_with_the_whole_batch() -> None:
    case = CASES["sd3"]
    request, seen = case.request(batch=2), []

    def note(step: int, latents: Tensor) -> None:
        seen.append((step, latents))

    last = drawn(case, request, ranks=2, groups=2, on_step=note, **STALE)
    assert [step for step, _ in seen] == list(range(STEPS))
    assert all(latents.shape == request.noise.shape for _, latents in seen)
    assert torch.equal(seen[-1][1], last)
    assert not torch.equal(seen[-2][1], last)


def test_another_model_may_be_sampled_inside_a_call_but_not_the_same_one() -> None:
    case, other = CASES["pixart"], CASES["dit"]
    request, small = case.request(), other.request(size=(16, 16))
    alone, inner = drawn(case, request, **STALE), drawn(other, small, **STALE)
    found: list[Tensor] = []

    def nested(step: int, latents: Tensor) -> None:
        found.append(drawn(other, small, **STALE))
        with pytest.raises(UnsupportedError, match="another sampling call"):
            drawn(case, request, **STALE)

    assert torch.equal(drawn(case, request, on_step=nested, **STALE), alone)
    assert all(torch.equal(x, inner) for x in found)


SIDE_EFFECTS = """
import os, torch, diffusers
before = dict(os.environ)
classes = [kind for kind in vars(torch.nn).values() if isinstance(kind, type)]
kept = [dict(vars(kind)) for kind in classes]
import lightning_dpipe.sampling.sampler
assert dict(os.environ) == before
assert [dict(vars(kind)) for kind in classes] == kept
assert [kind for kind in vars(torch.nn).values() if isinstance(kind, type)] == classes
"""


def test_importing_changes_neither_the_environment_nor_torch() -> None:
    subprocess.run([sys.executable, "-c", SIDE_EFFECTS], check=True, timeout=120)


def test_two_calls_in_two_threads_do_not_mix() -> None:
    jobs = {name: CASES[name] for name in ("pixart", "dit", "sd3")}
    expected = {name: drawn(case, case.request(), **STALE) for name, case in jobs.items()}
    found: dict[str, Tensor] = {}

    def work(name: str) -> None:
        found[name] = drawn(jobs[name], jobs[name].request(), ranks=2, **STALE)

    threads = [threading.Thread(target=work, args=(name,)) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[name], expected[name]) for name in jobs)

"""Solvers over patches: which are refused, whose noise it is, how often their index moves."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from lightning_dpipe.core.errors import SpecError, UnsupportedError
from lightning_dpipe.sampling.patches import PatchPlan
from lightning_dpipe.sampling.solver import PatchSolvers, SolverOptions, check_solver, prepared
from sampled import CASES, dit_loop, draw, model_of
from stale import stale

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("scheduler", "match"),
    [
        (DDIMScheduler(thresholding=True), "DDIMScheduler with thresholding=True"),
        (DPMSolverMultistepScheduler(thresholding=True), "thresholding=True"),
        (HeunDiscreteScheduler(), "HeunDiscreteScheduler calls the model several times"),
        (PNDMScheduler(), "PNDMScheduler calls the model several times"),
    ],
    ids=["ddim", "dpm", "heun", "pndm"],
)
def test_what_cannot_work_on_patches_is_refused_by_name_and_works_exactly(
    scheduler: Any, match: str
) -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request()
    with pytest.raises(UnsupportedError, match=match):
        draw(model, scheduler, request, mode="pipefusion", patches=2)
    expected = dit_loop(model, scheduler, request, {})
    assert torch.equal(draw(model, scheduler, request, ranks=2), expected)


class Standardised(DDIMScheduler):
    """Looks at all pixels without saying so."""

    def step(self, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().step(model_output / model_output.std(), *args, **kwargs)


def test_a_solver_that_looks_at_all_pixels_without_saying_so_is_found_by_trial() -> None:
    made = prepared(Standardised(), 3, SolverOptions(), CPU)
    with pytest.raises(UnsupportedError, match="Standardised: its steps on two halves"):
        check_solver(made, SolverOptions(), channels=4)


ELEMENTWISE = [
    "DDIMScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler", "EDMEulerScheduler", "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "IPNDMScheduler", "LCMScheduler",
    "LMSDiscreteScheduler", "TCDScheduler", "UniPCMultistepScheduler", "SASolverScheduler",
]  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_library_s_elementwise_solvers_pass_unmodified(name: str) -> None:
    made = prepared(getattr(diffusers, name)(), 6, SolverOptions(), CPU)
    check_solver(made, SolverOptions(), channels=4)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("kind", [DPMSolverMultistepScheduler, UniPCMultistepScheduler])
def test_every_order_equals_the_oracle_after_one_step_of_warm_up(order: int, kind: Any) -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request(steps=6)
    expected = stale("dit", model, kind(solver_order=order), request, cuts=(0, 2, 4, 6), warmup=1)
    drawn = draw(model, kind(solver_order=order), request, ranks=2, mode="pipefusion", patches=3)
    assert torch.equal(drawn, expected)


def noise_options(**step: Any) -> SolverOptions:
    return SolverOptions(step=step, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kind", "step"),
    [(DDPMScheduler, {}), (EulerAncestralDiscreteScheduler, {}), (DDIMScheduler, {"eta": 1.0})],
)
def test_noise_is_one_device_s_for_all_ranks_and_patches(kind: Any, step: dict[str, Any]) -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request(batch=2)
    more = {**step, "generator": torch.Generator().manual_seed(5)}
    expected = dit_loop(model, kind(), request, more)
    for plan in ({}, {"mode": "pipefusion", "patches": (0, 1, 4, 6), "warmup": request.num_steps}):
        drawn = draw(model, kind(), request, ranks=2, options=noise_options(**step), **plan)
        assert torch.equal(drawn, expected), plan
    found = [
        draw(
            model, kind(), request, ranks=ranks, options=noise_options(**step),
            mode="pipefusion", patches=3,
        )
        for ranks in (1, 2, 4)
    ]  # fmt: skip
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], expected)


def test_stale_noise_equals_the_oracle_that_is_given_its_rows() -> None:
    case, model = CASES["dit"], model_of("dit")
    request, cuts = case.request(), (0, 1, 4, 6)
    made = torch.Generator().manual_seed(5)
    draws = [torch.randn(request.noise.shape, generator=made) for _ in range(request.num_steps)]

    class Handed(DDIMScheduler):
        """DDIM whose noise is cut by hand from draws of the whole image."""

        def step(self, out: Tensor, t: Any, sample: Tensor, **more: Any) -> Any:
            heights = {2: slice(0, 2), 6: slice(2, 8), 4: slice(8, 12)}
            place = self.timesteps.tolist().index(int(t))
            noise = draws[place][:, :, heights[sample.shape[2]]]
            return super().step(out, t, sample, variance_noise=noise, **more)

    options = SolverOptions(step={"eta": 1.0})
    expected = stale("dit", model, Handed(), request, cuts=cuts, warmup=1, options=options)
    drawn = draw(
        model, DDIMScheduler(), request, ranks=2, options=noise_options(eta=1.0),
        mode="pipefusion", patches=cuts,
    )  # fmt: skip
    assert torch.equal(drawn, expected)


def test_one_generator_an_image_is_one_draw_an_image() -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request(batch=2)

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (7, 8)]

    expected = dit_loop(model, DDPMScheduler(), request, {"generator": generators()})
    for groups in (1, 2):
        drawn = draw(
            model, DDPMScheduler(), request, options=SolverOptions(generator=generators()),
            mode="pipefusion", patches=3, warmup=99, groups=groups,
        )  # fmt: skip
        torch.testing.assert_close(drawn, expected)
        assert groups == 2 or torch.equal(drawn, expected)


def test_a_wrong_number_of_generators_is_refused() -> None:
    generators = [torch.Generator() for _ in range(3)]
    with pytest.raises(SpecError, match="3 generators for 2 images"):
        draw(
            model_of("dit"), DDPMScheduler(), CASES["dit"].request(batch=2),
            options=SolverOptions(generator=generators),
        )  # fmt: skip


@pytest.mark.parametrize("plan", [{}, {"mode": "pipefusion", "patches": 3}])
def test_one_generator_draws_for_the_batch_however_it_is_grouped(plan: dict[str, Any]) -> None:
    case, model = CASES["dit"], model_of("dit")
    request = case.request(batch=3)
    found = [
        draw(
            model, DDPMScheduler(), request, ranks=2, options=noise_options(), groups=groups, **plan
        )
        for groups in (1, 2, 3)
    ]
    for other in found[1:]:  # GEMMs of another size have other last bits, noise must not
        torch.testing.assert_close(other, found[0])


def test_the_step_index_moves_once_a_step_and_the_given_scheduler_stays_fresh() -> None:
    given = FlowMatchEulerDiscreteScheduler()
    made = prepared(given, 5, SolverOptions(), CPU)
    x = torch.randn(1, 4, 8, 4)
    solvers = PatchSolvers(made, PatchPlan((0, 1, 4)), 2, x, SolverOptions())
    for step in range(5):
        for m in range(2):
            solvers.model_input(step, m)
            solvers.step(step, m, torch.randn(1, 4, (2, 6)[m], 4))
        assert [copy.step_index for copy in solvers.copies] == [step + 1] * 2
    assert made.step_index is None
    assert given.step_index is None

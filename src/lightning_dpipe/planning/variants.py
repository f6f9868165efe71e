"""The steps a plan can run, with and without self-conditioning, and what it costs on average.

In:     a Plan and its Profile.
Out:    schedules per variant, the plan with its bubbles filled, the expected iteration.
Source: DiffusionPipe (arXiv 2405.01248), section 4.2: the objective is p T_SC + (1 - p) T.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.filling import fill as fill_bubbles
from lightning_dpipe.planning.filling import lower_bound_us
from lightning_dpipe.planning.paper_filling import paper_fill
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.simulate import simulate

SELF_CONDITIONING = 0.5
"""Usual share of steps with the extra forward (Analog Bits, arXiv 2208.04202)."""

FILLERS: Mapping[str, Callable[..., tuple[Fill, ...]]] = {
    "auto": fill_bubbles,
    "whole": partial(fill_bubbles, partial=False),
    "at_home": partial(fill_bubbles, move=False),
    "paper": paper_fill,
}
"""How frozen work is placed: ours; ours without partial batches, or without moving samples; or
DiffusionPipe's own greedy."""


def filler_of(fill: bool | str) -> str | None:
    """Key of `FILLERS` that an option names; None: frozen work runs up front.

    Raises:
        PlanError: There is none of that name.
    """
    if isinstance(fill, bool):
        return "auto" if fill else None
    if fill not in FILLERS:
        raise PlanError(f"unknown fill={fill!r}; choose True, False or one of {', '.join(FILLERS)}")
    return fill


def variants_of(graph: ModelGraph, probability: float) -> tuple[tuple[bool, float], ...]:
    """(self-conditioned, share of steps) of every variant of the step that can occur."""
    if graph.feedback is None or probability <= 0:
        return ((False, 1.0),)
    if probability >= 1:
        return ((True, 1.0),)
    return ((False, 1 - probability), (True, probability))


def with_fills(plan: Plan, profile: Profile, *, fill: str = "auto") -> Plan:
    """The plan with its bubbles filled anew, for each variant of the schedule that can occur."""
    fills = tuple(
        f
        for variant in ((False,) if profile.graph.feedback is None else (False, True))
        for f in FILLERS[fill](
            plan, schedule_of(plan, self_conditioned=variant), profile, self_conditioned=variant
        )
    )
    return replace(plan, fills=fills)


def expected_us(plan: Plan, profile: Profile, probability: float = SELF_CONDITIONING) -> float:
    """Predicted iteration, averaged over the variants."""
    return sum(
        share * simulate(plan, schedule_of(plan, self_conditioned=variant), profile).end_us
        for variant, share in variants_of(profile.graph, probability)
    )


def expected_bound_us(
    plan: Plan,
    profile: Profile,
    probability: float = SELF_CONDITIONING,
    *,
    filled: str | None = "auto",
) -> float:
    """What no placement of fills beats, averaged over the variants; unfilled: what it costs."""
    if filled is None:
        return expected_us(replace(plan, fills=()), profile, probability)
    return sum(
        share * lower_bound_us(plan, profile, self_conditioned=variant)
        for variant, share in variants_of(profile.graph, probability)
    )

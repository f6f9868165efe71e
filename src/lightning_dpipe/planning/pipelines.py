"""Where the plans of a search come from: stages of one backbone, or of several in two directions.

In:     costs of all stages, one cutting of the batch, the numbers of stages to look at.
Out:    per number of stages a bound on all its pipelines, and a generator of the promising ones.

With ``objective="paper"`` the pipeline of least T_max, DiffusionPipe's own objective, is the only
one. For several backbones, whose bounds alone leave many cuts alike, one near it comes first in
any case.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Stage
from lightning_dpipe.planning.best_first import cuts_by_bound, expected_least_us, stages_of
from lightning_dpipe.planning.bounds import ChainBounds
from lightning_dpipe.planning.directions import Directions
from lightning_dpipe.planning.dp import paper_partition
from lightning_dpipe.planning.pair_bounds import PairBounds
from lightning_dpipe.planning.pair_cuts import fitting, least_pair_us, pair_chains, pair_stages
from lightning_dpipe.planning.pair_dp import paper_pair_partition
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import variants_of

OBJECTIVES = ("simulated", "paper")
"""What makes one cut better than another: the simulated iteration, or DiffusionPipe's T_max."""

DEARER = 16
"""A prefix of positions, cut in two directions, takes about as long as so many of stages."""

Chains = Iterator[tuple[float, tuple[Stage, ...]]]
"""Stages with the expected iteration that they and all later ones cannot beat; no stages: others
were left out."""

Pipeline = tuple[float, Callable[[Callable[[], float]], Chains]]
"""A bound on all pipelines of a kind, and those below a limit that may fall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What pipelines are compared by. Fields as in `auto.Space` and `bounds.ChainBounds`."""

    probability: float
    frozen_us: int
    hidden: bool
    shared: bool
    max_nodes: int | None
    objective: str

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise PlanError(
                f"unknown objective {self.objective!r}; choose one of {', '.join(OBJECTIVES)}"
            )


def pipelines(
    costs: BackboneCosts | Directions, cutting: Cutting, stages: list[int], aim: Aim
) -> Iterator[Pipeline]:
    """One stage of every backbone a device or more, for each number of stages."""
    if isinstance(costs, Directions):
        yield from _of_several(costs, cutting, stages, aim)
    else:
        yield from _of_one(costs, cutting, stages, aim)


def _of_one(
    costs: BackboneCosts, cutting: Cutting, stages: list[int], aim: Aim
) -> Iterator[Pipeline]:
    variants = [
        (
            share,
            ChainBounds(
                costs,
                replace(cutting, self_conditioned=conditioned),
                max_stages=stages[-1],
                frozen_us=aim.frozen_us,
                hidden=aim.hidden,
                shared=aim.shared,
            ),
        )
        for conditioned, share in variants_of(costs.profile.graph, aim.probability)
    ]

    def paper(num_stages: int) -> Iterator[tuple[Stage, ...]]:
        conditioned = sum(share for share, b in variants if b.cutting.self_conditioned)
        cut = paper_partition(costs, cutting, num_stages=num_stages, probability=conditioned)
        yield stages_of(costs.backbone, cut, variants[0][1])

    def every(num_stages: int, limit_us: Callable[[], float]) -> Chains:
        cuts = cuts_by_bound(variants, num_stages, limit_us=limit_us, max_nodes=aim.max_nodes)
        for cut in cuts:
            yield cut.bound_us, stages_of(costs.backbone, cut, variants[0][1])

    for n in stages:
        least_us = expected_least_us(variants, n)
        if aim.objective == "paper":
            yield least_us, partial(_paper_first, least_us, partial(paper, n), None)
        else:
            yield least_us, partial(every, n)


def _of_several(
    directions: Directions, cutting: Cutting, positions: list[int], aim: Aim
) -> Iterator[Pipeline]:
    profile = directions.profile
    variants = [
        (
            share,
            PairBounds(
                directions,
                replace(cutting, self_conditioned=conditioned),
                max_positions=positions[-1],
                frozen_us=aim.frozen_us,
                hidden=aim.hidden,
                shared=aim.shared,
            ),
        )
        for conditioned, share in variants_of(profile.graph, aim.probability)
    ]

    def paper(num_positions: int) -> Iterator[tuple[Stage, ...]]:
        conditioned = sum(share for share, b in variants if b.cutting.self_conditioned)
        cut = paper_pair_partition(
            directions,
            cutting,
            num_positions=num_positions,
            probability=conditioned,
            quick=aim.objective != "paper",
        )
        yield from fitting(profile, cutting, pair_stages(profile, directions, cut.positions))

    max_nodes = None if aim.max_nodes is None else max(1, aim.max_nodes // DEARER)

    def every(num_positions: int, limit_us: Callable[[], float]) -> Chains:
        yield from pair_chains(variants, num_positions, max_nodes, limit_us)

    for n in positions:
        least_us = least_pair_us(variants, n)
        others = None if aim.objective == "paper" else partial(every, n)
        yield least_us, partial(_paper_first, least_us, partial(paper, n), others)


def _paper_first(
    least_us: float,
    paper: Callable[[], Iterator[tuple[Stage, ...]]],
    every: Callable[[Callable[[], float]], Chains] | None,
    limit_us: Callable[[], float],
) -> Chains:
    """The pipeline of least T_max, then all others; or that others were left out."""
    try:
        first = next(paper(), ())
    except PlanError:
        first = ()  # memory allows none that it is sure of: the others are looked at closer
    if first:
        yield least_us, first
    if every is None:
        yield least_us, ()
        return
    for bound_us, stages in every(limit_us):
        if stages != first or not stages:
            yield bound_us, stages

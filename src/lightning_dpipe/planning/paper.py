"""DiffusionPipe's own planner, complete: the baseline that ours is compared with.

In:     a Profile, the world and the batch per device.
Out:    the plan whose simulated iteration, filled by the paper's greedy, is shortest.
Source: DiffusionPipe (arXiv 2405.01248), sections 4 and 5: for every S, M and D the cut of least
        T_max (`dp`), then filling, then the best simulated iteration. As in its evaluation all
        stages have the same number of replicas, so a group of S devices stands for all D.
"""

from dataclasses import dataclass, replace

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan, default_groups, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning import best_first
from lightning_dpipe.planning.auto import MICROBATCHES, Found, only_backbone, plan_of
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.bounds import ChainBounds
from lightning_dpipe.planning.dp import paper_partition
from lightning_dpipe.planning.network import Network
from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from lightning_dpipe.planning.variants import (
    SELF_CONDITIONING,
    expected_us,
    variants_of,
    with_fills,
)

MAX_STAGES = 8


def paper_plan(
    profile: Profile,
    *,
    world_size: int,
    batch_size: int,
    num_stages: int | None = None,
    least_stages: int = 2,
    num_microbatches: int | None = None,
    probability: float = SELF_CONDITIONING,
    fill: bool = True,
    network: Network | None = None,
) -> Found:
    """Plan as DiffusionPipe does.

    Args:
        profile: Costs.
        world_size: All ranks.
        batch_size: Samples per device.
        num_stages: Stages, if they are not to be searched for.
        least_stages: Fewest stages of the search; 1 lets it fall back on data parallelism.
        num_microbatches: Micro-batches, if they are not to be searched for.
        probability: Share of self-conditioned steps, if the model has them.
        fill: Whether bubbles are filled; otherwise frozen work runs up front.
        network: See `auto.Space`.

    Raises:
        PlanError: No plan fits the numbers, the model or the memory.
        UnsupportedError: The model has several backbones, or devices are of several kinds.
    """
    if profile.kinds:
        raise UnsupportedError(
            f"DiffusionPipe's planner takes all devices to be alike, the profile has "
            f"{1 + len(profile.others)} kinds; use make_plan"
        )
    variants = variants_of(profile.graph, probability)
    probability = sum(share for conditioned, share in variants if conditioned)
    base = Plan(
        graph_digest=digest(profile.graph),
        profile_digest=digest(profile),
        groups=default_groups(world_size, 1),
        stages=(),
        num_microbatches=1,
        batch_size=batch_size,
        schedule="1f1b",
    )
    best: Plan | None = None
    best_us, tried = float("inf"), 0
    most = min(MAX_STAGES, world_size, len(profile.graph.backbones[0].layers))
    stage_choices = range(least_stages, most + 1) if num_stages is None else (num_stages,)
    choices = _Choices(profile, variants, fill, network, tuple(stage_choices), num_microbatches)
    bounded = choices.by_bound(world_size, batch_size)
    for least_us, num, bounds in bounded:
        if least_us >= best_us:
            break  # every plan that is left has a bound above the best: the outer search is over
        costs = bounds.costs
        assert isinstance(costs, BackboneCosts)
        cut = paper_partition(
            costs, bounds.cutting, num_stages=num, probability=probability, uniform=True
        )
        stages = best_first.stages_of(costs.backbone, cut, bounds)
        plan = plan_of(base, bounds.cutting, stages)
        seen = profile if network is None else network.placed(profile, plan)
        if fill:
            plan = with_fills(plan, seen, fill="paper")
        tried += 1
        plan_us = expected_us(plan, seen, probability)
        if plan_us < best_us:
            best, best_us = plan, plan_us
    if best is None:
        raise PlanError(
            f"no plan for {world_size} ranks with {batch_size} samples each "
            f"(num_stages={num_stages}, num_microbatches={num_microbatches}); "
            "use more devices or a smaller batch"
        )
    return Found(plan=best, expected_us=best_us, bound_us=bounded[0][0], num_plans=tried)


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the outer search goes through."""

    profile: Profile
    variants: tuple[tuple[bool, float], ...]
    fill: bool
    network: Network | None
    num_stages: tuple[int, ...]
    num_microbatches: int | None

    def by_bound(self, world_size: int, batch_size: int) -> list[tuple[float, int, ChainBounds]]:
        """(bound, stages, bounds of one variant) of every S and M, least bound first."""
        backbone = only_backbone(self.profile)
        work = FrozenCosts.of(self.profile, samples=batch_size)
        frozen_us = work.least_us
        found = []
        for stages in self.num_stages:
            if world_size % stages:
                continue
            seen = self.profile
            if self.network is not None:
                seen = self.network.least(seen, default_groups(world_size, stages))
            costs = BackboneCosts(seen, backbone)
            m = self.num_microbatches
            for microbatches in MICROBATCHES if m is None else (m,):
                if microbatches <= batch_size * stages:
                    cutting = Cutting(
                        sizes=split_sizes(batch_size * stages, microbatches),
                        num_devices=stages,
                        num_groups=world_size // stages,
                        schedule="1f1b",
                        memory_bytes=self.profile.memory_bytes,
                    )
                    found.append(self._bounded(costs, cutting, stages, frozen_us))
        fits = [entry for entry in found if entry[0] < float("inf")]
        return sorted(fits, key=lambda entry: (entry[0], entry[1], entry[2].cutting.sizes))

    def _bounded(
        self, costs: BackboneCosts, cutting: Cutting, stages: int, frozen_us: int
    ) -> tuple[float, int, ChainBounds]:
        by_variant = [
            (
                share,
                ChainBounds(
                    costs,
                    replace(cutting, self_conditioned=conditioned),
                    max_stages=stages,
                    frozen_us=frozen_us,
                    hidden=self.fill,
                    uniform=True,
                ),
            )
            for conditioned, share in self.variants
        ]
        return best_first.expected_least_us(by_variant, stages), stages, by_variant[0][1]

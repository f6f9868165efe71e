"""Partition by dynamic programming over cuts and replicas, with DiffusionPipe's own objective.

In:     costs of all stages, the number of stages, the devices of one pipeline group.
Out:    the `Cut` of least (M + 2S - 2) W + Y over all cuts and replications.
Source: DiffusionPipe (arXiv 2405.01248), sections 4.1 and 4.2. W is the slowest stage (forward +
        backward of a micro-batch, or its traffic), Y the largest reduction time that no backward
        of an earlier stage hides. Ours differs: W and Y are not separable, so each state keeps all
        pairs that no other pair beats in both; traffic is every value that comes in, skips too.

Stages are added from the last to the first. What an earlier stage hides of the reductions behind it
is its own backward: Y' = max(sync, Y - backward).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.planning.best_first import Cut, Part
from lightning_dpipe.planning.partition import incoming_bytes
from lightning_dpipe.planning.stage_costs import Array, BackboneCosts, Cutting

_NEAR = 1 + 1e-9
_WIDER = (1.05, 1.2, 1.5)
"""Room for rounding, and limits on W relative to the least that are tried before all."""

_NONE = np.full(1, np.inf)


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages from some border on: slowest stage without and with self-conditioning, sync gap."""

    slowest_us: float
    slowest_sc_us: float
    gap_us: float
    parts: tuple[Part, ...]

    def beats(self, other: "Chain") -> bool:
        """No worse in all three."""
        return (
            self.slowest_us <= other.slowest_us
            and self.slowest_sc_us <= other.slowest_sc_us
            and self.gap_us <= other.gap_us
        )


def paper_partition(
    costs: BackboneCosts,
    cutting: Cutting,
    *,
    num_stages: int,
    probability: float = 0.0,
    uniform: bool = False,
) -> Cut:
    """The cut whose T_max is least.

    Args:
        costs: Of the backbone.
        cutting: How a group cuts its batch.
        num_stages: Stages to make.
        probability: Share of self-conditioned steps; the objective is the expectation.
        uniform: One device for every stage, as in the paper's evaluation.

    Raises:
        PlanError: No cut has that many stages, devices and that little memory.
    """
    walk = _Walk(costs, cutting, num_stages, conditioned=probability > 0, uniform=uniform)
    factor = cutting.num_microbatches + 2 * num_stages - 2

    def t_max_us(chain: Chain) -> float:
        slowest_us = (1 - probability) * chain.slowest_us + probability * chain.slowest_sc_us
        return factor * slowest_us + chain.gap_us

    def rank(chain: Chain) -> tuple[float, list[tuple[int, int]]]:
        return t_max_us(chain), [(p.stop, p.replicas) for p in chain.parts]

    if not np.isfinite(walk.least_us):
        raise PlanError(
            f"the {costs.num_layers} layers of {costs.backbone!r} cannot be cut into {num_stages} "
            f"stages on {cutting.num_devices} devices within their memory; choose another number"
        )
    # T_max >= factor * W: the least W gives a T_max, and no W above that / factor wins. A few wider
    # limits before that find a better T_max, which rules out more.
    best = min(walk.chains(walk.least_us, factor, np.inf), key=rank)
    for wider in _WIDER:
        if walk.least_us * wider < t_max_us(best) / factor:
            found = walk.chains(walk.least_us * wider, factor, t_max_us(best))
            best = min((best, *found), key=rank)
    most_us = t_max_us(best)
    best = min((best, *walk.chains(most_us / factor, factor, most_us)), key=rank)
    return Cut(parts=best.parts, bound_us=t_max_us(best))


class _Walk:
    """All chains of `num_stages` stages whose slowest stage stays within a limit."""

    def __init__(
        self,
        costs: BackboneCosts,
        cutting: Cutting,
        num_stages: int,
        *,
        conditioned: bool,
        uniform: bool,
    ) -> None:
        self.num_stages, self.num_devices = num_stages, cutting.num_devices
        self.num_layers = costs.num_layers
        most = 1 if uniform else min(cutting.num_devices, cutting.sizes[-1])
        # By position, from the last stage of the pipeline to the first.
        self.tables = [
            [_Stages(costs, cutting, r, i + 1, conditioned=conditioned) for r in range(1, most + 1)]
            for i in range(num_stages)
        ]
        self.before = self._before()
        # At most this much backward, recomputation included, is in front of a border.
        rows = cutting.sizes[0]
        self.hides_us = (costs.at("forward_us", rows) + costs.at("backward_us", rows))[0]
        self.least_us = float(self.before.get((num_stages, self.num_devices), _NONE)[-1])

    def chains(self, limit_us: float, factor: int, most_us: float) -> list[Chain]:
        """Chains of all layers on all devices that no other one beats.

        Only those whose stages stay within `limit_us` and whose T_max can be within `most_us`.
        """
        limit = _Limit(limit_us * _NEAR, factor, most_us * _NEAR, self.hides_us)
        fronts: dict[int, list[list[Chain]]] = {}
        for i, tables in enumerate(self.tables):
            behind, fronts = fronts, {}
            for devices in range(i + 1, self.num_devices - (self.num_stages - i - 1) + 1):
                before = self.before.get((self.num_stages - i - 1, self.num_devices - devices))
                if before is None:
                    continue
                found: list[list[Chain]] = [[] for _ in range(self.num_layers + 1)]
                for stage in tables:
                    left = devices - stage.replicas
                    if i == 0 and left == 0:
                        stage.prepend_all(found, None, before, limit)
                    elif left in behind:
                        stage.prepend_all(found, behind[left], before, limit)
                fronts[devices] = found
        return fronts[self.num_devices][0]

    def _before(self) -> dict[tuple[int, int], Array]:
        """(stages, devices) -> per border: least slowest stage of the layers in front of it."""
        first = np.full(self.num_layers + 1, np.inf)
        first[0] = 0.0
        found = {(0, 0): first}
        for stages in range(1, self.num_stages + 1):
            for devices in range(stages, self.num_devices + 1):
                ends = [
                    np.maximum(found[stages - 1, left][:, None], stage.limited).min(axis=0)
                    for stage in self.tables[self.num_stages - stages]
                    if (stages - 1, left := devices - stage.replicas) in found
                ]
                if ends:
                    found[stages, devices] = np.minimum.reduce(ends)
        return found


@dataclass(frozen=True, slots=True)
class _Limit:
    """What a chain may reach: W, and factor * W + Y, of which `hides_us[start]` may still go."""

    slowest_us: float
    factor: int
    t_max_us: float
    hides_us: Array

    def allows(self, chain: Chain, before_us: float, start: int) -> bool:
        slowest_us = max(chain.slowest_us, before_us)
        gap_us = max(0.0, chain.gap_us - float(self.hides_us[start]))
        return self.factor * slowest_us + gap_us <= self.t_max_us


class _Stages:
    """All stages on `replicas` devices at one position, and how they go before a chain."""

    def __init__(
        self,
        costs: BackboneCosts,
        cutting: Cutting,
        replicas: int,
        from_back: int,
        *,
        conditioned: bool,
    ) -> None:
        self.replicas = replicas
        rows = -(-cutting.sizes[0] // replicas)
        table = costs.table(cutting, replicas=replicas, from_back=from_back)
        forward = costs.at("forward_us", rows)
        self.backward = costs.at("backward_us", rows) + np.where(table.recompute, forward, 0)
        self.exists = np.isfinite(table.work)
        self.sync = table.sync
        link = costs.profile.p2p
        both_ways = np.array(incoming_bytes(costs.profile.graph, costs.backbone), float) * rows
        wire = both_ways * 1e6 / link.bytes_per_s
        sent = both_ways > 0
        self.slowest = np.maximum(
            forward + self.backward, np.where(sent, wire + 2 * link.latency_us, 0)
        )
        # Without self-conditioned steps all chains are alike in this: it keeps none alive.
        self.slowest_sc = conditioned * np.maximum(
            2 * forward + self.backward, np.where(sent, 1.5 * wire + 3 * link.latency_us, 0)
        )
        self.limited = np.where(self.exists, self.slowest, np.inf)

    def prepend_all(
        self,
        found: Sequence[list[Chain]],
        behind: Sequence[Sequence[Chain]] | None,
        before: Array,
        limit: "_Limit",
    ) -> None:
        """Add every chain that starts with one of these stages to the front of its start.

        Only those that may stay within the limit; `before` is the slowest stage in front of them.
        """
        last = len(found) - 1
        within = (self.limited <= limit.slowest_us) & (before <= limit.slowest_us)[:, None]
        for start, stop in np.argwhere(within).tolist():
            if (stop == last) != (behind is None):
                continue
            for rest in _END if behind is None else behind[stop]:
                chain = self._prepend(start, stop, rest)
                if limit.allows(chain, float(before[start]), start):
                    _keep(found[start], chain)

    def _prepend(self, start: int, stop: int, rest: Chain) -> Chain:
        return Chain(
            slowest_us=max(rest.slowest_us, float(self.slowest[start, stop])),
            slowest_sc_us=max(rest.slowest_sc_us, float(self.slowest_sc[start, stop])),
            gap_us=max(
                float(self.sync[start, stop]), rest.gap_us - float(self.backward[start, stop])
            ),
            parts=(Part(start, stop, self.replicas), *rest.parts),
        )


_END = (Chain(0.0, 0.0, 0.0, ()),)


def _keep(front: list[Chain], chain: Chain) -> None:
    """Add a chain unless another is as good; drop those it makes useless."""
    if any(other.beats(chain) for other in front):
        return
    front[:] = [other for other in front if not chain.beats(other)]
    front.append(chain)

"""The best nodes for the devices of a plan's pipelines: exact on small clusters, bounded on others.

In:     a Plan, its Profile and a Cluster.
Out:    `Mapped`: the plan on the best ranks found, its iteration, bytes per card, and
        what no mapping beats.

The regular layouts of `placement` come first. Then branch and bound goes through all assignments
up to renaming nodes and groups (patterns of nodes in ascending order, nodes in order of appearance:
every class of equal assignments has such a member, its lexicographically least). What is not
assigned yet is taken as free, and adding to an assignment never makes a link faster, so the
iteration simulated for a part bounds every completion.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Legs, Links, Profile
from lightning_dpipe.planning.placement import (
    Nodes,
    bytes_on,
    check_world,
    edges_of,
    gradient_bytes,
    groups_on,
    layouts,
    links_of,
    merged,
    nodes_of,
    same_stages,
    traffic,
)
from lightning_dpipe.planning.variants import SELF_CONDITIONING, expected_us

MAX_PARTS = 200
"""Parts of assignments that branch and bound looks at, unless told otherwise."""

Cost = tuple[float, int]
"""Iteration, bytes on the busiest card: compared in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A plan on its nodes.

    `iteration_us` is the larger of the simulated iteration and the time of the busiest card,
    `bound_us` what no mapping of these stages beats. `exact`: every mapping was looked at or
    bounded away, so nothing has a shorter iteration, nor an equal one with a less busy card.
    """

    plan: Plan
    iteration_us: float
    card_bytes: int
    bound_us: float
    exact: bool


def place(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    probability: float = SELF_CONDITIONING,
    max_parts: int = MAX_PARTS,
) -> Mapped:
    """Put the devices of `plan` on nodes so that its iteration is shortest.

    Among equal iterations the one with the fewest bytes on the busiest card wins; what is equal in
    both stays as it is.

    Args:
        plan: Stages, devices and number of groups; its fills are kept.
        profile: Costs; its links are replaced by the cluster's.
        cluster: Nodes and links.
        probability: Share of self-conditioned steps, if the model has them.
        max_parts: Parts of assignments to look at; 0 takes the best regular layout.

    Raises:
        PlanError: The cluster has fewer devices than the plan.
    """
    check_world(plan.world_size, cluster)
    costs = _Costs(plan, profile, cluster, probability)
    own = (plan.groups, *layouts(plan.world_size, plan.num_devices, cluster))
    best_groups = min(own, key=lambda groups: costs.of(nodes_of(groups, cluster)))
    best = costs.of(nodes_of(best_groups, cluster))
    bound = costs.least(())
    search = _Search(costs, best, max_parts)
    exact = bound >= best or search.run()
    if search.nodes is not None:
        best, best_groups = search.best, groups_on(search.nodes, cluster)
    return Mapped(
        plan=replace(plan, groups=best_groups),
        iteration_us=best[0],
        card_bytes=best[1],
        bound_us=best[0] if exact else bound[0],
        exact=exact,
    )


class _Costs:
    """Costs of whole assignments, and least costs of those that begin with given groups."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, probability: float) -> None:
        self.plan, self.profile, self.cluster = plan, profile, cluster
        self.probability = probability
        self.traffic = traffic(plan, profile)
        self.classes, self.gradients = same_stages(plan), gradient_bytes(plan, profile)
        self.p2p = merged([cluster.inside, cluster.between], best=True)
        self.simulated: dict[Links, float] = {}

    def of(self, nodes: Nodes) -> Cost:
        """Iteration and bytes of a whole assignment."""
        return self._cost(links_of(self.plan, nodes, self.cluster), nodes)

    def least(self, nodes: Nodes) -> Cost:
        """No assignment whose first groups are on `nodes` costs less."""
        counts = [Counter(group[d] for group in nodes for d in ds) for ds in self.classes]
        of_class = [
            self._least_legs(len(devices) * len(self.plan.groups), local)
            for devices, local in zip(self.classes, counts, strict=True)
        ]
        legs = {d: of_class[i] for i, devices in enumerate(self.classes) for d in devices}
        edges = edges_of(nodes, self.cluster) if nodes else {}
        links = Links(
            edges=tuple((a, b, link) for (a, b), link in edges.items()),
            stages=tuple(legs[stage.devices[0]] for stage in self.plan.stages),
        )
        return self._cost(links, nodes)

    def _least_legs(self, replicas: int, local: Counter[int]) -> Legs:
        """Legs of a class of which only the replicas `local` (by node) have their nodes."""
        num_nodes = self.plan.world_size // self.cluster.devices_per_node
        most = max([*local.values(), -(-replicas // max(1, num_nodes))])
        spans = max(len(local), -(-replicas // self.cluster.devices_per_node))
        inside = (most, self.cluster.inside)
        if spans == 1:
            return (inside,)
        speed = min(
            self.cluster.nic_bytes_per_s,
            self.cluster.inside.bytes_per_s * self.cluster.devices_per_node,
        )
        return (inside, (spans, replace(self.cluster.between, bytes_per_s=speed)))

    def _cost(self, links: Links, nodes: Nodes) -> Cost:
        on_cards = bytes_on(nodes, self.traffic, self.classes, self.gradients)
        busiest = max([*on_cards.values(), self._least_busy])
        card_us = busiest * 1e6 / self.cluster.nic_bytes_per_s
        return max(self._simulated_us(links), card_us), busiest

    @cached_property
    def _least_busy(self) -> int:
        """Bytes on the busiest card if every class is on as few nodes as hold it."""
        least = 0
        for devices, num_bytes in zip(self.classes, self.gradients, strict=True):
            replicas = len(devices) * len(self.plan.groups)
            spans = -(-replicas // self.cluster.devices_per_node)
            least = max(least, -(-2 * (spans - 1) * num_bytes // spans))
        return least

    def _simulated_us(self, links: Links) -> float:
        if links not in self.simulated:
            seen = replace(self.profile, links=links, p2p=self.p2p)
            self.simulated[links] = expected_us(self.plan, seen, self.probability)
        return self.simulated[links]


class _Search:
    """Depth first over groups; `nodes` is the best assignment if one beats what was known."""

    def __init__(self, costs: _Costs, best: Cost, max_parts: int) -> None:
        self.costs, self.best, self.left = costs, best, max_parts
        self.nodes: Nodes | None = None

    def run(self) -> bool:
        """Whether the search went through all assignments within its budget."""
        plan, per_node = self.costs.plan, self.costs.cluster.devices_per_node
        if plan.world_size % per_node:
            return False  # nodes that are not alike cannot be renamed
        free = [per_node] * (plan.world_size // per_node)
        return self._extend((), free)

    def _extend(self, nodes: Nodes, free: list[int]) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        if len(nodes) == len(self.costs.plan.groups):
            cost = self.costs.of(nodes)
            if cost < self.best:
                self.best, self.nodes = cost, nodes
            return True
        if nodes and self.costs.least(nodes) >= self.best:
            return True
        num_used = len({node for group in nodes for node in group})
        floor = nodes[-1] if nodes else ()
        for pattern in _patterns(len(self.costs.plan.groups[0]), free, num_used, floor):
            left = list(free)
            for node in pattern:
                left[node] -= 1
            if not self._extend((*nodes, pattern), left):
                return False
        return True


def _patterns(
    num_devices: int, free: Sequence[int], num_used: int, floor: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Nodes of one group's devices, ascending, none below `floor`; new nodes in order."""

    def extend(chosen: tuple[int, ...], used: int) -> Iterator[tuple[int, ...]]:
        if len(chosen) == num_devices:
            yield chosen
            return
        low = floor[len(chosen)] if chosen == floor[: len(chosen)] and floor else 0
        for node in range(low, min(used + 1, len(free))):
            if chosen.count(node) < free[node]:
                yield from extend((*chosen, node), max(used, node + 1))

    return extend((), num_used)

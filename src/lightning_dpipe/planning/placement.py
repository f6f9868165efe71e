"""Which node each device of each pipeline is on, what that costs in links, and in bytes on cards.

In:     a Cluster and the devices of the pipelines (`Plan.groups`; ranks are numbered node by node).
Out:    layouts to choose from, the links that a plan's pipelines see, bytes per network card.

Gradients are summed inside each node first, then over the k nodes that hold replicas: each local
replica reduces its share of the gradient with its like on the other nodes, so 2(k-1)/k of a stage's
bytes cross the card of each of its nodes, each way. Devices that reduce over nodes share their
node's card evenly. With pipelines inside nodes every node holds all stages: the bytes on its card
are the model's, as under data parallelism. Stages on nodes of their own take gradients off the
network and put activations on it. The same message of all pipelines goes out at about the same
time, so those with the same sender's or receiver's node share a card too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import Plan, default_groups
from lightning_dpipe.core.profile import Legs, Link, Links, Profile
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.tasks import task_graph

Groups = tuple[tuple[int, ...], ...]
"""``[group][device]``: global rank."""

Nodes = tuple[tuple[int, ...], ...]
"""``[group][device]``: node."""


def nodes_of(groups: Groups, cluster: Cluster) -> Nodes:
    """The node of each device of each group.

    Raises:
        ClusterError: The cluster has too few devices.
    """
    return tuple(tuple(cluster.node_of(rank) for rank in group) for group in groups)


def groups_on(nodes: Nodes, cluster: Cluster) -> Groups:
    """Number the devices node by node: `nodes_of` backwards.

    Nodes are renamed in the order in which they are met, last devices first, so that rank 0 is
    the last device of group 0.
    """
    names: dict[int, int] = {}
    used: Counter[int] = Counter()
    groups = []
    for group in nodes:
        ranks = []
        for node in reversed(group):
            name = names.setdefault(node, len(names))
            ranks.append(name * cluster.devices_per_node + used[node])
            used[node] += 1
        groups.append(tuple(reversed(ranks)))
    return tuple(groups)


def layouts(world_size: int, num_devices: int, cluster: Cluster) -> tuple[Groups, ...]:
    """Regular placements of pipelines of `num_devices`, consecutive ranks first.

    In the others each node holds k consecutive devices of as many pipelines as fit: k = 1 gives
    every stage nodes of its own, k = `num_devices` keeps pipelines inside nodes.
    """
    found = [default_groups(world_size, num_devices)]
    per_node, nodes = cluster.devices_per_node, world_size // cluster.devices_per_node
    if world_size % per_node == 0:
        for k in range(min(num_devices, per_node), 0, -1):
            chunks = num_devices // k
            if num_devices % k == 0 and per_node % k == 0 and nodes % chunks == 0:
                placed = [
                    tuple((g // (per_node // k)) * chunks + d // k for d in range(num_devices))
                    for g in range(world_size // num_devices)
                ]
                found.append(groups_on(tuple(placed), cluster))
    return tuple(dict.fromkeys(found))


# ---- links


def links_of(plan: Plan, nodes: Nodes, cluster: Cluster) -> Links:
    """What the pipelines of `plan` see if its devices are on `nodes`."""
    classes = same_stages(plan)
    reduced = reductions(classes, nodes, cluster)
    legs = {device: reduced[i] for i, devices in enumerate(classes) for device in devices}
    return Links(
        edges=tuple((a, b, link) for (a, b), link in edges_of(nodes, cluster).items()),
        stages=tuple(legs[stage.devices[0]] for stage in plan.stages),
    )


def placed(profile: Profile, plan: Plan, cluster: Cluster) -> Profile:
    """The profile with the links that the pipelines of `plan` see where its groups put them."""
    return replace(profile, links=links_of(plan, nodes_of(plan.groups, cluster), cluster))


def least(profile: Profile, groups: Groups, cluster: Cluster) -> Profile:
    """The profile with links that no plan on `groups` beats, whatever its stages."""
    nodes = nodes_of(groups, cluster)
    num_devices = len(groups[0])
    edges = edges_of(nodes, cluster)
    ahead = [edges[a, b] for a in range(num_devices) for b in range(a + 1, num_devices)]
    ahead += [edges[b, a] for a in range(num_devices) for b in range(a + 1, num_devices)]
    counts = [Counter(group[d] for group in nodes) for d in range(num_devices)]
    by_replicas = []
    for replicas in range(1, num_devices + 1):
        choices = []
        for first in range(num_devices - replicas + 1):
            own = _joined(counts[first : first + replicas])
            others = counts[:first] + counts[first + replicas :]
            choices.append(_legs(own, _sharing([own, *others]), cluster))
        by_replicas.append((replicas * len(groups), _least_legs(choices)))
    links = Links(edges=(), replicas=tuple(by_replicas))
    return replace(profile, links=links, p2p=merged(ahead or [cluster.inside], best=True))


def best_of(profiles: Sequence[Profile]) -> Profile:
    """The profile with links that no plan beats on the groups of any of these `least` ones."""
    found = [p.links.by_replicas for p in profiles if p.links is not None]
    replicas = tuple((n, _least_legs([legs[n] for legs in found])) for n in found[0])
    p2p = merged([p.p2p for p in profiles], best=True)
    return replace(profiles[0], links=Links(edges=(), replicas=replicas), p2p=p2p)


def reductions(classes: Sequence[tuple[int, ...]], nodes: Nodes, cluster: Cluster) -> list[Legs]:
    """How the gradients of each class of devices with the same stages are summed."""
    members = [Counter(group[d] for group in nodes for d in devices) for devices in classes]
    sharing = _sharing(members)
    return [_legs(own, sharing, cluster) for own in members]


def _sharing(members: Iterable[Counter[int]]) -> Counter[int]:
    """Per node: replicas that sum gradients with other nodes, from the replicas of each class."""
    return _joined(own for own in members if len(own) > 1)


def _joined(counts: Iterable[Counter[int]]) -> Counter[int]:
    joined: Counter[int] = Counter()
    for count in counts:
        joined.update(count)
    return joined


def _legs(members: Counter[int], sharing: Counter[int], cluster: Cluster) -> Legs:
    inside = (max(members.values()), cluster.inside)
    if len(members) == 1:
        return (inside,)
    speed = min(
        min(n * cluster.inside.bytes_per_s, n * cluster.nic_bytes_per_s // sharing[node])
        for node, n in members.items()
    )
    return (inside, (len(members), replace(cluster.between, bytes_per_s=speed)))


def _least_legs(choices: Sequence[Legs]) -> Legs:
    """Legs that take no longer than any of `choices`."""
    return tuple(
        (min(n for n, _ in leg), merged([link for _, link in leg], best=True))
        for leg in zip(*choices, strict=False)  # a choice without the second leg leaves it out
    )


def edges_of(nodes: Nodes, cluster: Cluster) -> Mapping[tuple[int, int], Link]:
    """Links between the devices of a pipeline: the slowest of all pipelines', which run alike."""
    num_devices = len(nodes[0])
    return {
        (a, b): _edge([(group[a], group[b]) for group in nodes], cluster)
        for a in range(num_devices)
        for b in range(num_devices)
        if a != b
    }


def _edge(ends: Sequence[tuple[int, int]], cluster: Cluster) -> Link:
    crossing = [(a, b) for a, b in ends if a != b]
    if not crossing:
        return cluster.inside
    flows = max(
        *Counter(a for a, _ in crossing).values(), *Counter(b for _, b in crossing).values()
    )
    speed = max(1, min(cluster.between.bytes_per_s, cluster.nic_bytes_per_s // flows))
    between = replace(cluster.between, bytes_per_s=speed)
    return between if len(crossing) == len(ends) else merged([between, cluster.inside], best=False)


def merged(links: Iterable[Link], *, best: bool) -> Link:
    """A link no slower (`best`) or no faster than any of these."""
    all_links = tuple(links)
    low, high = (min, max) if best else (max, min)
    copies = [x.host_bytes_per_s or 2**62 for x in all_links]  # 0: nothing is copied
    copied = high(copies)
    return Link(
        latency_us=low(x.latency_us for x in all_links),
        bytes_per_s=high(x.bytes_per_s for x in all_links),
        host_us=low(x.host_us for x in all_links),
        host_bytes_per_s=0 if copied == 2**62 else copied,
    )


# ---- bytes


def same_stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Devices of a pipeline by the stages they hold: those sum their gradients."""
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(plan.num_devices):
        found.setdefault(plan.stages_on(device), []).append(device)
    return tuple(map(tuple, found.values()))


def gradient_bytes(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """Gradient bytes of each of `same_stages`."""
    return tuple(
        sum(
            profile.trained_bytes(stage.backbone, stage.start, stage.stop)
            for stage in map(plan.stages.__getitem__, plan.stages_on(devices[0]))
        )
        for devices in same_stages(plan)
    )


def traffic(
    plan: Plan, profile: Profile, *, self_conditioned: bool = False
) -> Mapping[tuple[int, int], int]:
    """Bytes a step sends from device to device of a pipeline: activations, gradients, rows.

    Each row that a device encodes is delivered once, up front or ahead: the bytes are the same.
    """
    shape = StepShape(
        sizes=(plan.batch_size,) * plan.num_devices,
        next_sizes=None,
        encoded=False,
        self_conditioned=self_conditioned,
    )
    schedule = schedule_of(plan, self_conditioned=self_conditioned)
    return task_graph(replace(plan, fills=()), schedule, profile, shape).traffic


def card_bytes(
    plan: Plan, profile: Profile, cluster: Cluster, *, self_conditioned: bool = False
) -> tuple[int, ...]:
    """Bytes that a step moves over each node's network card, the larger of in and out.

    Raises:
        ClusterError: The cluster has too few devices.
    """
    sent = traffic(plan, profile, self_conditioned=self_conditioned)
    classes, gradients = same_stages(plan), gradient_bytes(plan, profile)
    found = bytes_on(nodes_of(plan.groups, cluster), sent, classes, gradients)
    return tuple(found.get(node, 0) for node in range(cluster.nodes))


def bytes_on(
    nodes: Nodes,
    sent: Mapping[tuple[int, int], int],
    classes: Sequence[tuple[int, ...]],
    gradients: Sequence[int],
) -> Mapping[int, int]:
    """`card_bytes` by node, from the bytes of messages and of each class's gradients."""
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for group in nodes:
        for (a, b), num_bytes in sent.items():
            if group[a] != group[b]:
                out[group[a]] += num_bytes
                into[group[b]] += num_bytes
    for devices, num_bytes in zip(classes, gradients, strict=True):
        members = {group[d] for group in nodes for d in devices}
        for node in members:
            crossing = -(-2 * (len(members) - 1) * num_bytes // len(members))
            out[node] += crossing
            into[node] += crossing
    return {node: max(out[node], into[node]) for node in out | into}


def check_world(world_size: int, cluster: Cluster) -> None:
    """Refuse a world that the cluster does not hold.

    Raises:
        PlanError: It has too few devices.
    """
    if world_size > cluster.world_size:
        raise PlanError(
            f"{world_size} ranks do not fit cluster {cluster.name!r} of {cluster.nodes} x "
            f"{cluster.devices_per_node} devices; use fewer ranks or raise its nodes"
        )

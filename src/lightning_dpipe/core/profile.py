"""What layers, links and the optimizer cost. A Profile holds times and bytes, never a choice."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.graph import ModelGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Cost of one layer at each of the component's profiled sizes (one entry a size).

    `input_grad_us` is the part of the backward that is left when the weights need no gradient;
    ``backward_us`` is the full backward (I + W). A layer no gradient passes has zeros in both.
    """

    name: str
    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    input_grad_us: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    param_bytes: int
    trained_bytes: int
    optimizer_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentCost:
    """Costs of one component's layers at ascending local batch sizes `samples`."""

    name: str
    samples: tuple[int, ...]
    layers: tuple[LayerCost, ...]

    def __post_init__(self) -> None:
        at = self.samples
        if not at or at[0] < 1 or any(a >= b for a, b in pairwise(at)):
            raise ProfileError(
                f"{self.name!r} is profiled at {list(at)} samples; expected ascending sizes of at "
                "least 1: profile it again"
            )
        for layer in self.layers:
            for name in _BY_SIZE:
                costs = getattr(layer, name)
                if len(costs) != len(at) or min(costs) < 0:
                    raise ProfileError(
                        f"{name} of layer {layer.name!r} of {self.name!r} is {list(costs)}; "
                        f"expected {len(at)} figures of at least 0, for {list(at)} samples"
                    )
            _check_least(f"layer {layer.name!r} of {self.name!r}", layer, _ONCE)


_BY_SIZE = ("forward_us", "backward_us", "input_grad_us", "activation_bytes")
_ONCE = ("param_bytes", "trained_bytes", "optimizer_us")


def _check_least(where: str, owner: object, names: Iterable[str], least: int = 0) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < least:
            raise ProfileError(f"{name} of {where} is {value}; expected at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency and bandwidth of a kind of transfer, and what a message costs its sender's host.

    The host pays `host_us` a message and, where it copies (gloo), `host_bytes_per_s`; 0 is free.
    """

    latency_us: int
    bytes_per_s: int
    host_us: int = 0
    host_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        _check_least("a link", self, ("bytes_per_s",), least=1)
        _check_least("a link", self, ("latency_us", "host_us", "host_bytes_per_s"))

    def send_us(self, num_bytes: int) -> int:
        """Time that the sender itself is busy with a message."""
        copied = num_bytes * 1_000_000 // self.host_bytes_per_s if self.host_bytes_per_s else 0
        return self.host_us + copied

    def transfer_us(self, num_bytes: int) -> int:
        """Time from send to arrival of `num_bytes`."""
        return self.latency_us + -(-num_bytes * 1_000_000 // self.bytes_per_s) if num_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """What differs between the kinds of devices of one world."""

    device: str
    costs: tuple[ComponentCost, ...]
    memory_bytes: int | None = None
    fill_us: int = 0


Legs = tuple[tuple[int, Link], ...]
"""A gradient reduction: (participants, link) of each ring that follows the one before it."""


def reduce_us(num_bytes: int, legs: Legs) -> int:
    """Time of summing `num_bytes` over all legs, one after the other."""
    return sum(link.transfer_us(-(-2 * (n - 1) * num_bytes // n)) for n, link in legs)


@dataclass(frozen=True, kw_only=True)
class Links:
    """What the devices of a pipeline see once it is known on which nodes they are.

    `edges` are (source, target, link) between devices of a pipeline, `stages[s]` the legs of a
    stage: inside each node, then over nodes. `replicas` are (n, legs) of any stage with n replicas
    in all, for bounds on plans whose stages are not known yet.
    """

    edges: tuple[tuple[int, int, Link], ...]
    stages: tuple[Legs, ...] = ()
    replicas: tuple[tuple[int, Legs], ...] = ()

    @cached_property
    def by_edge(self) -> Mapping[tuple[int, int], Link]:
        """The link from one device to another."""
        return {(source, target): link for source, target, link in self.edges}

    @cached_property
    def by_replicas(self) -> Mapping[int, Legs]:
        """The least legs of a number of replicas."""
        return dict(self.replicas)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All costs of one model on one kind of device, or on several (`core.fleet`).

    `overhead_us` is what an iteration costs beside its ops (loop, logging, loss exchange),
    `fill_us` what starting one piece of frozen work costs beside its layers (Python, launches,
    keeping the rows). `estimated` marks times that were computed (roofline) rather than measured.
    `kinds[r]` is the kind of global rank r: 0 is this profile's own device, k is
    ``others[k - 1]``; empty where all ranks are alike. Every cost that a method of this class
    returns is that of kind 0. With `links` the devices of a pipeline are known to be on nodes, and
    `p2p` and `allreduce` hold for none of them.
    """

    graph: ModelGraph
    costs: tuple[ComponentCost, ...]
    p2p: Link
    allreduce: Link
    device: str
    dtype: str
    overhead_us: int = 0
    fill_us: int = 0
    memory_bytes: int | None = None
    estimated: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    others: tuple[DeviceCosts, ...] = ()
    kinds: tuple[int, ...] = ()
    links: Links | None = None

    def __post_init__(self) -> None:
        wrong = [kind for kind in self.kinds if not 0 <= kind <= len(self.others)]
        if wrong:
            raise ProfileError(
                f"a rank is of kind {wrong[0]}, but the profile knows {1 + len(self.others)} kinds "
                "of devices; number them from 0"
            )
        _check_least("the profile", self, ("overhead_us", "fill_us", "memory_bytes"))
        known = {c.name: len(c.layers) for c in self.graph.components}
        for costs in (self.costs, *(x.costs for x in self.others)):
            names = [cost.name for cost in costs]
            if len(set(names)) != len(names):
                raise ProfileError(f"costs of {', '.join(names)}: two have one name; profile again")
            for cost in costs:
                if known.get(cost.name, len(cost.layers)) != len(cost.layers):
                    raise ProfileError(
                        f"the profile has costs of {len(cost.layers)} layers of {cost.name!r}, its "
                        f"model has {known[cost.name]}; profile this model again"
                    )

    def on(self, rank: int) -> "Profile":
        """The profile of a global rank's own kind of device."""
        return self.of_kind(self.kinds[rank]) if self.kinds else self

    def of_kind(self, kind: int) -> "Profile":
        """The profile of a world of this kind of device only."""
        return self._of_kinds[kind]

    @cached_property
    def _of_kinds(self) -> tuple["Profile", ...]:
        if not self.kinds:
            return (self,)
        alone = replace(self, others=(), kinds=())
        return alone, *(
            replace(
                alone,
                device=x.device,
                costs=x.costs,
                memory_bytes=x.memory_bytes,
                fill_us=x.fill_us,
            )
            for x in self.others
        )

    @cached_property
    def _by_name(self) -> dict[str, ComponentCost]:
        return {cost.name: cost for cost in self.costs}

    def component(self, name: str) -> ComponentCost:
        """Find a component's costs.

        Raises:
            ProfileError: It was not profiled.
        """
        if name not in self._by_name:
            raise ProfileError(
                f"component {name!r} is not in the profile, which has: {', '.join(self._by_name)}; "
                "profile this model again"
            )
        return self._by_name[name]

    def link(self, source: int, target: int) -> Link:
        """The link between two devices of a pipeline."""
        return (
            self.p2p if self.links is None else self.links.by_edge.get((source, target), self.p2p)
        )

    def legs(self, replicas: int, stage: int | None = None) -> Legs:
        """How the gradients of a stage with so many replicas in all are summed."""
        one_ring = ((replicas, self.allreduce),)
        if self.links is None:
            return one_ring
        if stage is not None and self.links.stages:
            return self.links.stages[stage]
        return self.links.by_replicas.get(replicas, one_ring)

    def forward_us(self, component: str, start: int, stop: int, samples: int) -> int:
        """Forward time of layers ``[start, stop)`` on `samples` samples."""
        cost = self.component(component)
        return sum(
            interpolate(cost.samples, x.forward_us, samples) for x in cost.layers[start:stop]
        )

    def backward_us(self, component: str, start: int, stop: int, samples: int) -> int:
        """Full backward time of layers ``[start, stop)``; the layers' status is in their costs."""
        cost = self.component(component)
        return sum(
            interpolate(cost.samples, x.backward_us, samples) for x in cost.layers[start:stop]
        )

    def input_grad_us(self, component: str, start: int, stop: int, samples: int) -> int:
        """Input-gradient part (I) of the backward of layers ``[start, stop)``."""
        cost = self.component(component)
        return sum(
            interpolate(cost.samples, x.input_grad_us, samples) for x in cost.layers[start:stop]
        )

    def optimizer_us(self, component: str, start: int, stop: int) -> int:
        """Optimizer step time of layers ``[start, stop)``."""
        return sum(x.optimizer_us for x in self.component(component).layers[start:stop])

    def trained_bytes(self, component: str, start: int, stop: int) -> int:
        """Gradient bytes of layers ``[start, stop)``."""
        return sum(x.trained_bytes for x in self.component(component).layers[start:stop])


def interpolate(samples: tuple[int, ...], costs: tuple[int, ...], n: int) -> int:
    """Cost at `n` samples: linear between the profiled sizes, and beyond them along the last two.

    Raises:
        ProfileError: `n` is negative.
    """
    if n <= 0:
        if n < 0:
            raise ProfileError(f"asked for the cost of {n} samples; expected a count >= 0")
        return 0
    at = bisect_left(samples, n)
    if at < len(samples) and samples[at] == n:
        return costs[at]
    if len(samples) == 1:
        return costs[0] * n // samples[0]
    low = min(max(at - 1, 0), len(samples) - 2)
    x0, x1, y0, y1 = samples[low], samples[low + 1], costs[low], costs[low + 1]
    return max(0, y0 + (y1 - y0) * (n - x0) // (x1 - x0))

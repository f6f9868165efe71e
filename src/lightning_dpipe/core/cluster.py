"""Machines one may not have: devices, nodes and the links between them.

In:     a mapping (a cluster file), or keyword arguments. Out: what a roofline profile and a mapping
of ranks onto nodes need. Ranks are numbered node by node.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_dpipe.core.errors import ClusterError
from lightning_dpipe.core.graph import DTYPE_BYTES
from lightning_dpipe.core.profile import Link

_FREE = ("host_us", "host_bytes_per_s")
"""Fields of a link that a cluster file may leave out: 0 costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    `flops_per_s` is the peak of matrix products by dtype. A kernel of ``f`` FLOPs gets the share
    ``max_efficiency * f / (f + half_efficiency_flops)`` of it: small kernels leave units idle, so
    time per sample falls as batches grow. `memory_efficiency` is the share of
    `memory_bytes_per_s` that streaming kernels get; `launch_us` is the least a kernel takes when
    the host launches each one.
    """

    name: str
    flops_per_s: Mapping[str, int]
    memory_bytes: int
    memory_bytes_per_s: int
    max_efficiency: float
    half_efficiency_flops: int
    memory_efficiency: float
    launch_us: int

    def __post_init__(self) -> None:
        zero = ("launch_us", "half_efficiency_flops")
        _check_positive(f"device {self.name!r}", Device, _values(self), zero=zero)
        for name in ("max_efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ClusterError(
                    f"{name} of device {self.name!r} is {getattr(self, name)}; "
                    "expected a share in (0, 1]"
                )
        if not isinstance(self.flops_per_s, Mapping) or not self.flops_per_s:
            raise ClusterError(f"device {self.name!r} has no flops_per_s; give at least one dtype")
        for dtype, flops in self.flops_per_s.items():
            if dtype not in DTYPE_BYTES:
                raise ClusterError(
                    f"flops_per_s of device {self.name!r} names {dtype!r}; "
                    f"known: {', '.join(DTYPE_BYTES)}"
                )
            if not _is_number(flops) or not 0 < flops < math.inf:
                raise ClusterError(
                    f"flops_per_s[{dtype}] of device {self.name!r} is {flops!r}; expected a "
                    "number above 0"
                )

    def matrix_us(self, flops: int, dtype: str) -> float:
        """Time of one matrix product or convolution of `flops`, operands of `dtype`.

        Raises:
            ClusterError: The device's peak for the dtype is not known.
        """
        if not flops:
            return 0.0
        if dtype not in self.flops_per_s:
            raise ClusterError(
                f"device {self.name!r} has no flops_per_s for {dtype}, only for "
                f"{', '.join(self.flops_per_s)}; add it to the cluster file"
            )
        # flops / (peak * efficiency), with the efficiency written out.
        best = self.flops_per_s[dtype] * self.max_efficiency
        return (flops + self.half_efficiency_flops) / best * 1e6

    def memory_us(self, num_bytes: int) -> float:
        """Time of streaming `num_bytes` to or from memory."""
        return num_bytes / (self.memory_bytes_per_s * self.memory_efficiency) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` machines of `devices_per_node` devices, all alike unless `node_kinds` says otherwise.

    ``node_kinds[n]`` is the kind of node n's devices: 0 is `device`, k is ``others[k - 1]``.
    `inside` is one transfer between two devices of a node, `between` one between two nodes while
    nothing else is on the network (a single one may not use every card); all devices of a node
    share `nic_bytes_per_s`, each way.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    inside: Link
    between: Link
    nic_bytes_per_s: int
    others: tuple[Device, ...] = ()
    node_kinds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(f"cluster {self.name!r}", Cluster, _values(self))
        kinds = 1 + len(self.others)
        known = set(self.node_kinds) == set(range(kinds))
        if (self.others or self.node_kinds) and not (known and len(self.node_kinds) == self.nodes):
            raise ClusterError(
                f"node_kinds of cluster {self.name!r} is {self.node_kinds} for {self.nodes} nodes "
                f"and {kinds} kinds of devices; name the kind of every node, and each kind"
            )

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> "Cluster":
        """Read a cluster file's content.

        Raises:
            ClusterError: A field is missing, unknown or out of range; the message names it.
        """
        _check_fields("the cluster", cls, data, optional=("others", "node_kinds"))
        others, kinds = data.get("others", ()), data.get("node_kinds", ())
        for name, value in (("others", others), ("node_kinds", kinds)):
            if not isinstance(value, list | tuple) or (
                name == "node_kinds" and not all(map(_is_number, value))
            ):
                what = "numbers" if name == "node_kinds" else "devices"
                raise ClusterError(f"{name} of the cluster is {value!r}; expected a list of {what}")
        for number, device in enumerate((data["device"], *others)):
            where = f"its device of kind {number}" if number else "its device"
            _check_fields(where, Device, device, optional=())
        for name in ("inside", "between"):
            _check_fields(f"its link {name!r}", Link, data[name], optional=_FREE)
            where = f"link {name} of cluster {data['name']!r}"
            _check_positive(where, Link, data[name], zero=("latency_us", *_FREE))
        parts = {
            "device": Device(**data["device"]),
            "inside": Link(**data["inside"]),
            "between": Link(**data["between"]),
            "others": tuple(Device(**device) for device in others),
            "node_kinds": tuple(kinds),
        }
        return cls(**{**data, **parts})

    @property
    def world_size(self) -> int:
        """All devices."""
        return self.nodes * self.devices_per_node

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of every rank's device, empty where all are alike (`Profile.kinds`)."""
        return tuple(kind for kind in self.node_kinds for _ in range(self.devices_per_node))

    def node_of(self, rank: int) -> int:
        """The node of a global rank.

        Raises:
            ClusterError: The cluster has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ClusterError(
                f"rank {rank} is not in cluster {self.name!r} of {self.world_size} devices"
            )
        return rank // self.devices_per_node

    def link(self, source: int, target: int) -> Link:
        """What a transfer between two ranks costs when nothing else is on the way."""
        return self.inside if self.node_of(source) == self.node_of(target) else self.between

    def ring(self, num_nodes: int, *, side_by_side: int = 1) -> Link:
        """What each rank of a ring reduction over `num_nodes` nodes sees.

        A ring that visits node after node crosses each node's network card once each way;
        `side_by_side` rings (one per stage of pipelines that stay inside nodes) share it.
        """
        if num_nodes == 1:
            return self.inside
        return Link(
            latency_us=self.between.latency_us,
            bytes_per_s=max(1, min(self.inside.bytes_per_s, self.nic_bytes_per_s // side_by_side)),
            host_us=self.between.host_us,
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(owner: Any) -> dict[str, Any]:
    return {field.name: getattr(owner, field.name) for field in fields(owner)}


def _check_positive(
    where: str, kind: Any, values: Mapping[str, Any], zero: tuple[str, ...] = ()
) -> None:
    """Refuse what is not a number above 0; the fields `zero` may be 0."""
    for field in fields(kind):
        if field.type not in (int, float) or field.name not in values:
            continue
        value = values[field.name]
        fits = _is_number(value) and (field.type is float or isinstance(value, int))
        fits = fits and math.isfinite(value)
        if not fits or value < 0 or (value == 0 and field.name not in zero):
            kind = "a whole number" if field.type is int else "a number"
            least = "of at least 0" if field.name in zero else "above 0"
            raise ClusterError(f"{field.name} of {where} is {value!r}; expected {kind} {least}")


def _check_fields(where: str, kind: Any, data: Any, optional: tuple[str, ...]) -> None:
    names = [field.name for field in fields(kind)]
    if not isinstance(data, Mapping):
        raise ClusterError(f"{where} is {data!r}; expected a mapping of {', '.join(names)}")
    unknown = sorted(set(data) - set(names))
    missing = [n for n in names if n not in data and n not in optional]
    if unknown:
        raise ClusterError(f"{where} has no field {unknown[0]!r} (fields: {', '.join(names)})")
    if missing:
        raise ClusterError(f"{where} lacks {', '.join(missing)}; add it to the cluster file")

"""What sampling pays on a cluster: kernels, launches and transfers while all devices send.

In:     a Cluster (data-sheet peaks and links) and the kind of its links. Out: microseconds.
Beside the cluster file the model rests on two figures, one published and one fitted:
* `OVERLAP_SLOWDOWN`: kernels run 18.9 % longer while a transfer runs beside them (average over
  A100, H100, MI210 and MI250; arXiv 2507.03114).
* `PCIE.share`: fitted to one published figure, PipeFusion's 1.48x over the best sequence
  parallelism for PixArt at 1024 px on 8 L40; `benchmarks/sampling_costs.py` fits it anew.
"""

from dataclasses import dataclass, replace

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.profile import Link

OVERLAP_SLOWDOWN = 1.189
"""A kernel's time beside a transfer over its time alone."""

_FREE = Link(latency_us=0, bytes_per_s=10**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """`share`: what a device gets of a link's `bytes_per_s` while all devices send at once."""

    name: str
    share: float


PCIE = LinkKind(name="PCIe through the host", share=0.749)
NVLINK = LinkKind(name="NVLink", share=1.0)  # cluster files give what collectives measure
ETHERNET = LinkKind(name="Ethernet", share=1.0)  # as above


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`size` ranks at distance `stride`: one group of one axis, with all its sister groups."""

    size: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A cluster of equal devices and the kinds of its links; ranks are numbered node by node."""

    cluster: Cluster
    inside: LinkKind
    between: LinkKind = ETHERNET
    overlap_slowdown: float = OVERLAP_SLOWDOWN

    @property
    def device(self) -> Device:
        """Every device."""
        return self.cluster.device

    def crosses(self, span: Span) -> bool:
        """Whether a group of the span reaches over nodes."""
        return span.size > 1 and span.size * span.stride > self.cluster.devices_per_node

    def message_us(self, span: Span) -> int:
        """Until the first byte of a message is there."""
        return self._link(span).latency_us

    def host_us(self, span: Span) -> int:
        """Host time of starting a message."""
        return self._link(span).host_us

    def ring_us(self, span: Span, num_bytes: float) -> float:
        """Every rank sends `num_bytes` to its neighbour in the group: a hop, a ring collective."""
        flows = self.cluster.devices_per_node // self._local(span)
        return self._us(span, num_bytes, away=num_bytes, flows=flows)

    def exchange_us(self, span: Span, num_bytes: float) -> float:
        """Every rank sends `num_bytes` in equal parts to all others of its group."""
        away = num_bytes * (span.size - self._local(span)) / max(1, span.size - 1)
        return self._us(span, num_bytes, away=away, flows=self.cluster.devices_per_node)

    def beside_us(self, compute_us: float, transfer_us: float) -> float:
        """Compute and a transfer at the same time, until both are over."""
        slowed = compute_us + transfer_us * (1 - 1 / self.overlap_slowdown)
        return max(transfer_us, slowed)

    def with_free_links(self) -> "Hardware":
        """The same devices with links that cost nothing."""
        cluster = replace(self.cluster, inside=_FREE, between=_FREE, nic_bytes_per_s=10**30)
        return replace(self, cluster=cluster)

    def _us(self, span: Span, num_bytes: float, *, away: float, flows: int) -> float:
        """`num_bytes` a rank; of `flows` ranks of a node, `away` of them leave it."""
        if span.size == 1:
            return 0.0
        seconds = num_bytes / (self.cluster.inside.bytes_per_s * self.inside.share)
        if self.crosses(span):
            one = away / (self.cluster.between.bytes_per_s * self.between.share)
            all_flows = flows * away / (self.cluster.nic_bytes_per_s * self.between.share)
            seconds = max(seconds, one, all_flows)
        return seconds * 1e6

    def _link(self, span: Span) -> Link:
        return self.cluster.between if self.crosses(span) else self.cluster.inside

    def _local(self, span: Span) -> int:
        """Ranks of a group on one node."""
        return max(1, min(span.size, self.cluster.devices_per_node // span.stride))

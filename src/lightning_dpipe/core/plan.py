"""A Plan holds decisions only: where layers run, how the batch is cut, what fills which bubble.

It is made once (on rank 0 or offline), saved as JSON, and its digest is compared over all ranks
before the first step. It holds no times: those are the Profile's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers ``[start, stop)`` of a backbone on `devices`, one per replica of the stage.

    `shares` are whole-number weights by which the devices split the rows of each micro-batch (see
    `split_by_shares`); empty: equally.
    """

    backbone: str
    start: int
    stop: int
    devices: tuple[int, ...]
    recompute: bool = False
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != len(self.devices) or min(self.shares) < 1):
            raise PlanError(
                f"shares {self.shares} of the stage on devices {self.devices}; give one whole "
                "number of at least 1 per device, or none for equal shares"
            )

    def split(self, rows: int) -> tuple[int, ...]:
        """Rows of a micro-batch for each of the stage's devices."""
        if not self.shares:
            return split_sizes(rows, len(self.devices))
        return split_by_shares(rows, self.shares)

    def most_rows(self, device: int, rows: int) -> int:
        """At least as many rows of any `rows` as the device works on, rounded up."""
        shares = self.shares or (1,) * len(self.devices)
        return -(-rows * shares[self.devices.index(device)] // sum(shares))

    def rows_on(self, device: int, rows: int) -> tuple[int, int]:
        """The half-open range of a micro-batch's rows that one of its devices works on."""
        parts, at = self.split(rows), self.devices.index(device)
        first = sum(parts[:at])
        return first, first + parts[at]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """After op `after` on `device`, run layers ``[start, stop)`` of `component` for the next batch.

    Samples ``[first, last)`` are positions in the local batch of device `owner` of the same group
    (None: of the device itself). Whoever runs the first layer on a sample runs all of them: what
    travels is the owner's batch fields and what is encoded from them. `after` None means before the
    device's first op. `self_conditioned` says which of the two schedules it belongs to.
    """

    device: int
    after: Op | None
    component: str
    start: int
    stop: int
    first: int
    last: int
    self_conditioned: bool = False
    owner: int | None = None

    @property
    def home(self) -> int:
        """The device whose local batch the samples are from."""
        return self.device if self.owner is None else self.owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one model trains on one world.

    `groups[g][d]` is the global rank of device `d` in pipeline group `g`; groups are replicas of
    the whole pipeline. `batch_size` is per device, as under DDP, so a group's micro-batches cut
    ``batch_size * num_devices`` samples. `fills` is empty when frozen work runs up front. `origin`
    says what the digests stand for.

    With several backbones `stages` lists one backbone after the other, each in ascending layer
    order, and their ops share the devices: `lengths` are the relative lengths of each stage's
    forward and backward by which they are put in order (empty: 1 and 2), `conditioned` is the
    backbone whose steps may be self-conditioned.
    """

    graph_digest: str
    profile_digest: str
    groups: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]
    num_microbatches: int
    batch_size: int
    schedule: str
    fills: tuple[Fill, ...] = ()
    version: int = 1
    origin: Origin | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    conditioned: str | None = None

    def __post_init__(self) -> None:
        sizes = {len(group) for group in self.groups}
        if len(sizes) != 1:
            raise PlanError(f"pipeline groups have {sorted(sizes)} devices; expected one size")
        if sorted(r for g in self.groups for r in g) != list(range(self.world_size)):
            raise PlanError(
                f"groups {self.groups} do not hold each rank 0..{self.world_size - 1} once"
            )
        if self.num_microbatches < 1 or self.batch_size < 1:
            raise PlanError(
                f"num_microbatches={self.num_microbatches}, batch_size={self.batch_size}; "
                "both must be at least 1"
            )
        if self.lengths and len(self.lengths) != len(self.stages):
            raise PlanError(
                f"{len(self.lengths)} pairs of lengths for {len(self.stages)} stages; give one "
                "(forward, backward) per stage, or none"
            )

    @property
    def num_devices(self) -> int:
        """Devices of one pipeline group."""
        return len(self.groups[0])

    @property
    def world_size(self) -> int:
        """All ranks."""
        return sum(len(group) for group in self.groups)

    def locate(self, rank: int) -> tuple[int, int]:
        """Return (group, device) of a global rank."""
        for group, ranks in enumerate(self.groups):
            if rank in ranks:
                return group, ranks.index(rank)
        raise PlanError(f"rank {rank} is not in the plan's world of {self.world_size} ranks")

    @property
    def replica_sets(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same stages and so sum their gradients, each rank in one set."""
        found: dict[tuple[int, ...], list[int]] = {}
        for ranks in self.groups:
            for device, rank in enumerate(ranks):
                found.setdefault(self.stages_on(device), []).append(rank)
        return tuple(map(tuple, found.values()))

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Indices of each backbone's stages, in layer order, by backbone."""
        found: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            found.setdefault(stage.backbone, []).append(index)
        return tuple(map(tuple, found.values()))

    @property
    def stage_counts(self) -> str:
        """Stages of each backbone as text: ``4``, or ``2 + 2``."""
        return " + ".join(str(len(chain)) for chain in self.chains)

    def stages_on(self, device: int) -> tuple[int, ...]:
        """Indices of the stages that live on a device."""
        return tuple(i for i, stage in enumerate(self.stages) if device in stage.devices)


@lru_cache(maxsize=4096)
def split_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `tensor_split`: the first ``total % parts`` parts get one more."""
    base, extra = divmod(total, parts)
    return tuple(base + (i < extra) for i in range(parts))


def split_by_shares(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Split in proportion to whole-number weights, by largest remainders, earlier ones first.

    Nobody goes without as long as there is one for each: the largest parts give, the least share
    first. Equal weights give `split_sizes`.
    """
    weight = sum(shares)
    parts = [total * share // weight for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: -(total * shares[i] % weight))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    while total >= len(parts) and 0 in parts:
        parts[max(range(len(parts)), key=lambda i: (parts[i], -shares[i]))] -= 1
        parts[parts.index(0)] += 1
    return tuple(parts)


def default_groups(world_size: int, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ranks form a group, last stage on its lowest rank.

    Global rank 0 owns loggers and needs the loss, so it is the last device of group 0.

    Raises:
        PlanError: `world_size` is not a multiple of `num_devices`.
    """
    if num_devices < 1:
        raise PlanError(f"a pipeline of {num_devices} devices; num_stages must be at least 1")
    if world_size % num_devices:
        raise PlanError(
            f"{world_size} ranks cannot form pipelines of {num_devices} devices "
            f"({world_size} % {num_devices} = {world_size % num_devices}); "
            "choose num_stages so that it divides the world size"
        )
    return tuple(
        tuple(reversed(range(first, first + num_devices)))
        for first in range(0, world_size, num_devices)
    )

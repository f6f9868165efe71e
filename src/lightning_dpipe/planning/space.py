"""What a search may choose from.

In:     what the user fixed, the world, a group's batch.
Out:    devices of a pipeline, stages and micro-batches to try.
"""

from dataclasses import dataclass

from lightning_dpipe.core.plan import default_groups
from lightning_dpipe.planning.network import Network
from lightning_dpipe.planning.variants import SELF_CONDITIONING

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_GROUP = 16
"""Devices of a group. Larger ones only make replications finer: groups with the same number of
replicas for all stages are several smaller groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from; None leaves a number free.

    `group_devices` are devices of one pipeline group, `probability` the share of self-conditioned
    steps. `max_plans` is how many plans may be tried, `max_idle` how many of them after the best
    one (None: any number), `max_nodes` how many prefixes of stages each
    configuration may look at in strict order (None: all, see `best_first`). A plan within `close`
    (relative) of what bounds all that is left ends the search; 0 is exact. With the `objective`
    "paper" each configuration has one cut, that of least T_max, and the best of those that are
    simulated is taken; the bound is still one on all plans. With a `network` the devices of
    pipelines are put on its nodes, in regular layouts, and the best plan's then by `mapping`; links
    are those that its pipelines see there. `max_shares` are the splits of rows tried for a stage on
    devices of several kinds (None: all). Of plans whose ends differ by less than `margin`
    (relative) the one of the fewest stages, then micro-batches, is taken: what times cannot tell
    apart is told apart by what can go wrong.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    group_devices: int | None = None
    schedules: tuple[str, ...] = ("1f1b",)
    fill: bool | str = True
    probability: float = SELF_CONDITIONING
    max_group: int = MAX_GROUP
    max_plans: int = 64
    max_idle: int | None = 20
    max_nodes: int | None = 512
    close: float = 1e-4
    objective: str = "simulated"
    network: Network | None = None
    max_shares: int | None = 4
    margin: float = 0.0


def group_devices(space: Space, world_size: int) -> list[int]:
    """Devices of a pipeline group that the search tries."""
    if space.group_devices is not None:
        default_groups(world_size, space.group_devices)  # refuses what does not divide the world
        return [space.group_devices]
    return [d for d in range(1, min(world_size, space.max_group) + 1) if world_size % d == 0]


def stage_choices(space: Space, num_devices: int, num_layers: int) -> list[int]:
    """One stage on several devices is the same as that many groups of one: once is enough."""
    again = num_devices > 1 and space.group_devices is None
    choices = range(2 if again else 1, min(num_devices, num_layers) + 1)
    return [s for s in choices if space.num_stages in (None, s)]


def microbatch_choices(space: Space, batch: int) -> list[int]:
    """Micro-batches that the search tries for a group's batch of so many samples."""
    if space.num_microbatches is not None:
        return [space.num_microbatches] if 1 <= space.num_microbatches <= batch else []
    return [m for m in MICROBATCHES if m <= batch]

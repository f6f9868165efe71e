"""Fewest and most rows that any plan of a search space gives a layer at once: what to measure."""

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.planning.space import Space, group_devices, microbatch_choices


def row_range(space: Space, *, world_size: int, batch_size: int) -> tuple[int, int]:
    """Rows of the smallest and the largest share of a micro-batch over all candidates.

    A stage on r devices has a micro-batch's rows in r shares; one of S stages has at most D + 1 - S
    of the D devices of its group.

    Raises:
        PlanError: The space holds no candidate.
    """
    fewest = most = 0
    for devices in group_devices(space, world_size):
        if devices < (space.num_stages or 1):
            continue
        total = batch_size * devices
        for microbatches in microbatch_choices(space, total):
            sizes = split_sizes(total, microbatches)
            replicas = min(
                devices + 1 - (space.num_stages or 1), min(sizes)
            )  # at least one row each
            least = min(split_sizes(min(sizes), replicas))
            fewest = min(fewest, least) if fewest else least
            most = max(most, max(sizes))
    if not most:
        raise PlanError(
            f"no candidate for {world_size} ranks with {batch_size} samples each "
            f"(num_stages={space.num_stages}, num_microbatches={space.num_microbatches}); "
            "leave more of these to the planner, or use a larger batch"
        )
    return fewest, most

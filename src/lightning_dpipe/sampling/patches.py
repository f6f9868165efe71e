"""How an image's token rows are cut into patches. Cuts may be uneven and know nothing of ranks.

In:     the number of token rows of an image and the number of patches, or the cuts themselves.
Out:    half-open ranges of token rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_dpipe.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """Patches of one image: patch `m` holds token rows ``[cuts[m], cuts[m + 1])``."""

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        cuts = self.cuts
        if len(cuts) < 2 or cuts[0] != 0 or any(b <= a for a, b in pairwise(cuts)):
            raise PlanError(
                f"patches are cut at token rows {list(cuts)}; give rising cuts that start with 0 "
                "and end with the number of token rows"
            )

    def __len__(self) -> int:
        return len(self.cuts) - 1

    @property
    def num_rows(self) -> int:
        """Token rows of the image."""
        return self.cuts[-1]

    def rows(self, patch: int | None) -> tuple[int, int]:
        """Token rows ``[first, last)`` of a patch, or of the whole image (None)."""
        if patch is None:
            return 0, self.num_rows
        return self.cuts[patch], self.cuts[patch + 1]


def cut_rows(num_rows: int, patches: int | Sequence[int]) -> PatchPlan:
    """Cut `num_rows` token rows into `patches` of sizes that differ by one at most.

    Args:
        num_rows: Height of the latent divided by the model's patch size.
        patches: How many, or the cuts ``(0, ..., num_rows)``.

    Raises:
        PlanError: There is no such cut; the legal ones are listed.
    """
    if not isinstance(patches, int):
        plan = PatchPlan(tuple(patches))
        if plan.num_rows != num_rows:
            raise PlanError(
                f"patches are cut at {list(plan.cuts)}, the image has {num_rows} token rows; "
                f"let the last cut be {num_rows}, or give the number of patches"
            )
        return plan
    if not 1 <= patches <= num_rows:
        raise PlanError(
            f"{patches} patches of an image of {num_rows} token rows; legal are 1 to {num_rows}"
        )
    small, extra = divmod(num_rows, patches)
    cuts = [0]
    for m in range(patches):
        cuts.append(cuts[-1] + small + (m < extra))
    return PatchPlan(tuple(cuts))

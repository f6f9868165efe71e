"""What a user chooses about sampling over stages, and what is checked before anything runs.

In:     mode, stages, patches, warm-up, groups of images.
Out:    a frozen plan, the same on all ranks; nothing in it is derived from the number of ranks.
Source: PipeFusion, Fang et al., arXiv 2405.14430.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from lightning_dpipe.core.errors import PlanError


class Mode(str, Enum):
    """Exact, or one step stale."""

    EXACT = "exact"
    PIPEFUSION = "pipefusion"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """How to sample.

    Attributes:
        stages: Half-open layer ranges of the backbone, in order; those of the training plan.
        ranks: Rank of each stage; None: stage `i` on rank `i`.
        mode: ``exact`` computes what one process would; ``pipefusion`` sends patches through the
            stages, each attending to keys and values of which later patches are one step old.
        patches: Number of patches, or cuts in token rows; in mode pipefusion only.
        warmup: Steps with the whole image that fill keys and values first; at least 1.
        groups: The batch is drawn in so many parts, interleaved so that stages have work while
            others wait. Each part is what a batch of its size would be.
    """

    stages: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...] | None = None
    mode: Mode | str = Mode.EXACT
    patches: int | tuple[int, ...] = 1
    warmup: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        if self.mode not in {m.value for m in Mode}:
            raise PlanError(
                f"sampling mode {self.mode!r}; modes are {', '.join(m.value for m in Mode)}"
            )
        if self.mode == Mode.EXACT and self.patches != 1:
            raise PlanError(
                f"mode exact with {self.patches} patches; exact sampling takes whole images, use "
                "mode='pipefusion' for patches"
            )
        for name in ("warmup", "groups"):
            if getattr(self, name) < 1:
                raise PlanError(
                    f"{name}={getattr(self, name)}; expected at least 1"
                    + (", keys and values must be filled first" if name == "warmup" else "")
                )
        if self.ranks is not None and len(self.ranks) != len(self.stages):
            raise PlanError(
                f"{len(self.ranks)} ranks for {len(self.stages)} stages; give one a stage"
            )

    @property
    def owners(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return tuple(range(len(self.stages))) if self.ranks is None else self.ranks

    def check(self, num_layers: int) -> None:
        """Refuse stages that do not hold each of the backbone's layers exactly once.

        Raises:
            PlanError: They do not.
        """
        ends = [0, *(last for _, last in self.stages)]
        whole = self.stages and ends[-1] == num_layers
        if not whole or any(
            first != end or last <= first
            for (first, last), end in zip(self.stages, ends, strict=False)
        ):
            raise PlanError(
                f"stages {list(self.stages)} do not hold each of {num_layers} layers once, in "
                f"order; give ranges from 0 to {num_layers}"
            )


def even_stages(weights: Sequence[int], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Cut layers of these weights into stages whose largest weight is the least possible.

    Raises:
        PlanError: There are fewer layers than stages.
    """
    count = len(weights)
    if not 1 <= num_stages <= count:
        raise PlanError(f"{num_stages} stages of {count} layers; legal are 1 to {count}")
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[n]: (largest weight of a stage, cuts) of the first n layers
    best: list[tuple[int, tuple[int, ...]] | None] = [(0, (0,)), *[None] * count]
    for _ in range(num_stages):
        following: list[tuple[int, tuple[int, ...]] | None] = [None] * (count + 1)
        for last in range(1, count + 1):
            options = [
                (max(found[0], sums[last] - sums[first]), (*found[1], last))
                for first in range(last)
                if (found := best[first]) is not None
            ]
            following[last] = min(options, default=None)
        best = following
    chosen = best[count]
    assert chosen is not None
    return tuple(pairwise(chosen[1]))

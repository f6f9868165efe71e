"""Memory of one image on several devices: weights, keys and values, activations.

In:     a Family, a size, a Mode. Out: bytes of the fullest device, the text encoders apart.
Source: PipeFusion, arXiv 2405.14430, table 1, with N devices, L layers, P weights and KV the keys
and values of one layer: tensor P/N and KV/N; DistriFusion P and KV L; ring and Ulysses P and KV/N;
PipeFusion P/N and KV L/N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.modes import Mode
from lightning_dpipe.sampling.shapes import BYTES, Family, Size

_ACTIVATION_WIDTHS = 10
"""Widths a token holds at a block's peak: residual, norm, both sides of the MLP's activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the fullest device; text encoders are apart, as they may be elsewhere."""

    weights: int
    keys_values: int
    activations: int
    text_encoder: int

    @property
    def transformer(self) -> int:
        """Weights and keys and values."""
        return self.weights + self.keys_values

    @property
    def peak(self) -> int:
        """All but the text encoders."""
        return self.transformer + self.activations


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage, as even as possible."""
    return tuple((i + 1) * layers // stages - i * layers // stages for i in range(stages))


def contiguous(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of the blocks of every stage."""
    ends = [0, *accumulate(stage_layers(layers, stages))]
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


def lightest(family: Family, size: Size, mode: Mode) -> tuple[tuple[int, ...], ...]:
    """The contiguous stages whose fullest device has least: weights, keys and values.

    Blocks of Flux differ in weights but not in arithmetic, so these stages are a little slower than
    even ones.
    """
    one = family.kv_bytes(size, branches=family.branches // mode.cfg) // mode.sequence
    sizes = [kind.parameters * BYTES + one for kind in family.kinds()]
    low, high = max(sizes), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_packed(sizes, limit)) <= mode.pipefusion:
            high = limit
        else:
            low = limit + 1
    counts = _packed(sizes, low)
    while len(counts) < mode.pipefusion:  # fewer stages would do: halve the longest
        longest = counts.index(max(counts))
        half = counts[longest] // 2
        counts[longest : longest + 1] = [half, counts[longest] - half]
    ends = [0, *accumulate(counts)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


def _packed(sizes: Sequence[int], limit: int) -> list[int]:
    """Numbers of blocks of stages that are filled up to a limit one after the other."""
    counts, total = [0], 0
    for size in sizes:
        if total + size > limit:
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += size
    return counts


def memory(
    family: Family, size: Size, mode: Mode, *, held: Sequence[Sequence[int]] | None = None
) -> Memory:
    """Bytes of the device that has most.

    Args:
        family: The model.
        size: Of the image.
        mode: How.
        held: Numbers of the blocks of every stage's device; even contiguous stages by default.
            Weights beside the blocks are counted on every device.

    Raises:
        PlanError: `held` does not have every block on one of the mode's stages.
    """
    if held is None:
        held = contiguous(family.layers, mode.pipefusion)
    named = sorted(number for blocks in held for number in blocks)
    if len(held) != mode.pipefusion or named != list(range(family.layers)):
        raise PlanError(
            f"{len(held)} stages hold {len(named)} blocks; expected {mode.pipefusion} stages that "
            f"hold each of {family.layers} blocks once"
        )
    kinds = family.kinds()
    branches = family.branches // mode.cfg
    one = family.kv_bytes(size, branches=branches)
    stale = mode.pipefusion > 1 or mode.distrifusion > 1
    parts = []
    for blocks in held:
        weights = sum(kinds[number].parameters for number in blocks) * BYTES // mode.tensor
        kept = one * (len(blocks) if stale else 1) // (mode.sequence * mode.tensor)
        parts.append((weights + kept, weights, kept))
    _, weights, kept = max(parts)
    patches = 1 if mode.warmup else mode.patches  # a warm-up step has the whole image
    rows = -(-family.sequence(size) // (patches * mode.parts))
    beside = family.parameters - sum(kind.parameters for kind in kinds)
    return Memory(
        weights=weights + beside * BYTES,
        keys_values=kept,
        activations=branches * rows * family.width * _ACTIVATION_WIDTHS * BYTES // mode.tensor,
        text_encoder=family.text_parameters * BYTES,
    )

"""Which mode to draw an image in: the fastest in the model that is legal and fits in memory.

In:     a Family, Hardware, a size. Out: a Choice: the mode, its cost, and why, in words.
Every legal mode is costed, so the choice is never slower in the model than another one allowed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.costs import Cost, estimate
from lightning_dpipe.sampling.hardware import Hardware
from lightning_dpipe.sampling.modes import PATCHES, Mode, legal_modes
from lightning_dpipe.sampling.shapes import Family, Size

_SIMPLER = 1e-9  # of equal times the mode with fewer axes and patches wins

CLASSES: dict[str, Callable[[Mode], bool]] = {
    "one device": lambda m: not m.methods,
    "guidance on two halves": lambda m: m.methods == {"cfg"},
    "PipeFusion": lambda m: m.pipefusion > 1 and m.sequence == 1,
    "sequence parallelism": lambda m: m.sequence > 1 and m.pipefusion == 1,
    "PipeFusion with sequence parallelism": lambda m: m.pipefusion > 1 and m.sequence > 1,
    "DistriFusion": lambda m: m.distrifusion > 1,
    "tensor parallelism": lambda m: m.tensor > 1,
}
"""Every mode is of exactly one class, with or without cfg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best mode and what was thought about.

    Attributes:
        best: The cost of the chosen mode.
        by_class: Of each class of modes that may run, its fastest, fastest first.
        reasons: Sentences, the most important first.
    """

    best: Cost
    by_class: tuple[tuple[str, Cost], ...]
    reasons: tuple[str, ...]

    @property
    def mode(self) -> Mode:
        """The chosen mode."""
        return self.best.mode


def best_of(costs: Sequence[Cost]) -> Cost:
    """The fastest; of equal ones the simplest."""
    least = min(cost.total_us for cost in costs)
    equal = [cost for cost in costs if cost.total_us <= least * (1 + _SIMPLER)]
    return min(equal, key=lambda c: (len(c.mode.methods), c.mode.patches, c.total_us))


def class_of(mode: Mode) -> str:
    """The class that a mode is of."""
    return next(name for name, holds in CLASSES.items() if holds(mode))


def choose(
    family: Family,
    hardware: Hardware,
    size: Size,
    *,
    steps: int | None = None,
    num_devices: int | None = None,
    warmup: int = 1,
    exact: bool = False,
    patches: Sequence[int] = PATCHES,
) -> Choice:
    """Choose how to draw one image on all of some devices.

    Args:
        family: The model.
        hardware: Devices and links.
        size: Of the image, in pixels.
        steps: Solver steps; the family's usual number by default.
        num_devices: How many of the cluster's devices; all by default.
        warmup: Steps on the whole image before stale ones.
        exact: Only modes whose images are one device's.
        patches: Numbers of patches to try.

    Raises:
        PlanError: No mode is legal, or none fits in memory.
        SpecError: The image's sides do not fit the model.
    """
    count = family.steps if steps is None else steps
    devices = hardware.cluster.world_size if num_devices is None else num_devices
    modes = legal_modes(family, size, devices, steps=count, warmup=warmup, patches=patches)
    allowed = [mode for mode in modes if not (exact and mode.stale)]
    if not allowed:
        raise PlanError(
            f"{len(modes)} modes of {devices} devices are legal, but none is exact; "
            "allow stale keys and values"
        )
    costs = [estimate(family, size, hardware, mode, steps=count) for mode in allowed]
    memory = hardware.device.memory_bytes
    fitting = [cost for cost in costs if cost.memory.peak <= memory]
    if not fitting:
        least = min(cost.memory.peak for cost in costs)
        raise PlanError(
            f"the least of {len(costs)} modes needs {least / 1e9:.1f} GB a device, "
            f"{hardware.device.name} has {memory / 1e9:.1f} GB; use more devices or a smaller image"
        )
    best = best_of(fitting)
    classes = {
        name: best_of(those)
        for name in CLASSES
        if (those := [cost for cost in fitting if class_of(cost.mode) == name])
    }
    ordered = tuple(sorted(classes.items(), key=lambda item: item[1].total_us))
    reasons = (
        *_why(family, best, ordered),
        *_left_out(costs, fitting, memory),
        *((f"{len(modes) - len(allowed)} stale modes were not allowed",) if exact else ()),
    )
    return Choice(best=best, by_class=ordered, reasons=reasons)


def _why(family: Family, best: Cost, ordered: Sequence[tuple[str, Cost]]) -> list[str]:
    found = [
        f"{best.mode}: {best.total_us / 1e6:.2f} s an image of {family.name} in the model, "
        f"{best.transfer_share:.0%} of it for transfers, {best.memory.peak / 1e9:.1f} GB a device"
    ]
    for name, cost in ordered:
        if name != class_of(best.mode):
            found.append(
                f"{name} ({cost.mode}) takes {cost.total_us / best.total_us:.2f} times as long; "
                f"it sends {_sent(cost) / 1e6:.0f} MB a device and step, the choice "
                f"{_sent(best) / 1e6:.0f} MB"
            )
    if best.mode.stale:
        found.append("keys and values are up to one step old: images differ from one device's")
    return found


def _left_out(costs: Sequence[Cost], fitting: Sequence[Cost], memory: int) -> list[str]:
    lost = {class_of(c.mode) for c in costs} - {class_of(c.mode) for c in fitting}
    found = []
    for name in CLASSES:
        if name in lost:
            least = min(c.memory.peak for c in costs if class_of(c.mode) == name)
            found.append(
                f"{name} does not fit: {least / 1e9:.1f} GB a device of {memory / 1e9:.1f} GB"
            )
    return found


def _sent(cost: Cost) -> float:
    return float(sum(cost.sent_bytes.values()))

"""Ways to draw one image on several devices, and which of them a model and an image allow.

In:     degrees of parallelism. Out: a checked Mode.
Axes from the innermost (neighbouring ranks) to the outermost: Ulysses, ring, then tensor,
DistriFusion or PipeFusion, then the two branches of guidance; so pipelines reach over nodes before
sequence parallelism does.
Source: PipeFusion, arXiv 2405.14430, table 1; the axes of hybrids are xDiT's, arXiv 2411.01738.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.shapes import Family, Size

PATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of patches that `legal_modes` tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Degrees of every kind of parallelism; their product is the number of devices.

    Attributes:
        cfg: 2 runs the two branches of guidance on two halves of the devices.
        pipefusion: Stages of the patch pipeline.
        ulysses: Devices that share the heads of an attention.
        ring: Devices that pass keys and values around.
        tensor: Devices that share every matrix.
        distrifusion: Devices with a part of the image each, and stale keys and values of the rest.
        patches: Bands of token rows in the patch pipeline.
        warmup: Steps on the whole image before stale ones (PipeFusion, DistriFusion).
    """

    cfg: int = 1
    pipefusion: int = 1
    ulysses: int = 1
    ring: int = 1
    tensor: int = 1
    distrifusion: int = 1
    patches: int = 1
    warmup: int = 1

    @property
    def num_devices(self) -> int:
        """Product of all degrees."""
        return self.cfg * self.pipefusion * self.parts * self.tensor

    @property
    def sequence(self) -> int:
        """Devices of sequence parallelism."""
        return self.ulysses * self.ring

    @property
    def parts(self) -> int:
        """Parts into which the tokens of one patch are cut."""
        return self.sequence * self.distrifusion

    @property
    def stale(self) -> bool:
        """Whether keys and values may be one step old, so that images differ from one device's."""
        return self.distrifusion > 1 or (self.pipefusion > 1 and self.patches > 1)

    @property
    def methods(self) -> frozenset[str]:
        """Axes with more than one device."""
        return frozenset(name for name in AXES if getattr(self, name) > 1)

    def __str__(self) -> str:
        used = [f"{name} {getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        if self.pipefusion > 1:
            used.append(f"{self.patches} patches")
        return " x ".join(used) or "one device"


AXES = ("cfg", "pipefusion", "ulysses", "ring", "tensor", "distrifusion")


def check_mode(
    family: Family, size: Size, mode: Mode, *, steps: int, num_devices: int | None = None
) -> None:
    """Refuse what cannot be run.

    Args:
        family: The model.
        size: Of the image.
        mode: How.
        steps: Of the solver.
        num_devices: That there are; any number by default.

    Raises:
        PlanError: A degree does not fit the model or the image; the message has both numbers.
        SpecError: The image's sides do not fit the model.
    """
    rows = family.grid(size)[0]
    for name in (*AXES, "patches"):
        if getattr(mode, name) < 1:
            raise PlanError(f"{name} is {getattr(mode, name)}; expected at least 1")
    if num_devices is not None and mode.num_devices > num_devices:
        raise PlanError(f"{mode} needs {mode.num_devices} devices; there are {num_devices}")
    for name, wrong in _conflicts(family, mode, rows, steps):
        if wrong:
            raise PlanError(f"{mode} cannot draw {family.name}: {name}")


def _conflicts(family: Family, mode: Mode, rows: int, steps: int) -> Iterator[tuple[str, bool]]:
    bands = mode.patches * mode.parts
    yield (
        f"cfg {mode.cfg} for a model with {family.branches} branches; use 1"
        + (" or 2" if family.branches == 2 else ""),
        mode.cfg > family.branches or mode.cfg > 2,
    )
    for name in ("ulysses", "tensor"):
        degree = getattr(mode, name)
        yield (
            f"{family.heads} heads cannot be divided by {name} {degree}; use one of "
            f"{_divisors(family.heads)}",
            family.heads % degree > 0,
        )
    yield (
        f"{mode.pipefusion} stages for {family.layers} layers; use at most {family.layers}",
        mode.pipefusion > family.layers,
    )
    yield (
        f"{mode.patches} patches x {mode.parts} parts for {rows} rows of tokens; "
        f"use at most {rows} in all",
        bands > rows,
    )
    yield (
        f"{mode.patches} patches without a patch pipeline; use 1",
        mode.patches > 1 and mode.pipefusion == 1,
    )
    alone = mode.tensor > 1 or mode.distrifusion > 1
    others = mode.pipefusion * mode.sequence * min(mode.tensor, mode.distrifusion)
    yield (
        "tensor parallelism and DistriFusion combine with cfg only; leave the other axes at 1",
        alone and others > 1,
    )
    yield (f"{steps} steps; expected at least 1", steps < 1)
    yield (
        f"{mode.warmup} warm-up steps of {steps}; use 0 to {steps}",
        not 0 <= mode.warmup <= steps,
    )


def legal_modes(
    family: Family,
    size: Size,
    num_devices: int,
    *,
    steps: int,
    warmup: int = 1,
    patches: Sequence[int] = PATCHES,
) -> tuple[Mode, ...]:
    """Every mode that uses all devices and passes `check_mode`, in a fixed order.

    Raises:
        PlanError: There is none, with the first reason found.
    """
    if num_devices < 1:
        raise PlanError(f"{num_devices} devices; expected at least 1")
    found, reason = [], "no product of degrees"
    for mode in _products(num_devices, min(warmup, steps), patches):
        try:
            check_mode(family, size, mode, steps=steps)
        except PlanError as error:
            reason = str(error)
        else:
            found.append(mode)
    if not found:
        raise PlanError(f"no mode uses {num_devices} devices for {family.name}; last: {reason}")
    return tuple(found)


def _products(num_devices: int, warmup: int, patches: Sequence[int]) -> Iterator[Mode]:
    for cfg in (1, 2):
        if num_devices % cfg:
            continue
        rest = num_devices // cfg
        for stages in _divisors(rest):
            for ulysses in _divisors(rest // stages):
                ring = rest // stages // ulysses
                for count in patches if stages > 1 else (1,):
                    yield Mode(
                        cfg=cfg,
                        pipefusion=stages,
                        ulysses=ulysses,
                        ring=ring,
                        patches=count,
                        warmup=warmup,
                    )
        if rest > 1:
            yield Mode(cfg=cfg, tensor=rest, warmup=warmup)
            yield Mode(cfg=cfg, distrifusion=rest, warmup=warmup)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})

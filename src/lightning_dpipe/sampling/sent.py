"""Bytes that a device sends in one solver step, by method.

In:     a family, an image, a mode. Out: exact bytes by axis, and the papers' formulas.
With p tokens of the sequence, width w, L layers, N devices, activations of e bytes, and all
branches that a device works on:

| method | the papers' bytes a device and step | sent exactly |
|---|---|---|
| tensor | 4 p w L e | x (N-1)/N: two ring all-reduces a block |
| DistriFusion | 2 p w L e | x (N-1)/N: keys and values to all others |
| ring | 2 p w L e | x (N-1)/N: keys and values, N-1 hops |
| Ulysses | 4/N p w L e | x (N-1)/N: queries, keys, values, result |
| PipeFusion | 2 p w e | x 1/2: the paper counts what is received too |

Source: PipeFusion, arXiv 2405.14430, table 1. DistriFusion's devices all work on all text tokens,
so only keys and values of image tokens travel.
"""

from collections.abc import Mapping
from fractions import Fraction

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.modes import Mode
from lightning_dpipe.sampling.shapes import BYTES, Family, Size

_PAPER: Mapping[str, tuple[int, bool, bool]] = {  # factor, times layers, divided by devices
    "tensor": (4, True, False),
    "distrifusion": (2, True, False),
    "ring": (2, True, False),
    "ulysses": (4, True, True),
    "pipefusion": (2, False, False),
}


def paper_bytes(method: str, *, tokens: int, width: int, layers: int, num_devices: int) -> Fraction:
    """The paper's formula for one branch.

    Raises:
        PlanError: The method is none of its five.
    """
    if method not in _PAPER:
        raise PlanError(f"method is {method!r}; expected one of {', '.join(_PAPER)}")
    factor, per_layer, shared = _PAPER[method]
    total = factor * tokens * width * BYTES * (layers if per_layer else 1)
    return Fraction(total, num_devices if shared else 1)


def sent_bytes(family: Family, size: Size, mode: Mode) -> dict[str, Fraction]:
    """Bytes sent by the device that sends most, in one step, by axis with more than one device."""
    branches = family.branches // mode.cfg
    most = -(-family.layers // mode.pipefusion)  # layers of the largest stage
    tokens = Fraction(family.sequence(size) * most, family.layers)
    found = {}
    for method, degree in (("tensor", mode.tensor), ("ulysses", mode.ulysses)):
        if degree > 1:
            found[method] = _share(degree) * _formula(method, family, tokens / mode.ring, degree)
    if mode.ring > 1:
        # A device has the keys and values of 1/ring of the tokens, for 1/ulysses of the heads; all
        # of them go round for every patch.
        rounds = Fraction(mode.patches, mode.ulysses)
        found["ring"] = _share(mode.ring) * _formula("ring", family, tokens, 1) * rounds
    if mode.distrifusion > 1:
        image = Fraction(family.tokens(size))
        found["distrifusion"] = _share(mode.distrifusion) * _formula(
            "distrifusion", family, image, 1
        )
    if mode.pipefusion > 1:
        whole = Fraction(family.sequence(size), mode.sequence)
        found["pipefusion"] = _formula("pipefusion", family, whole, 1) / 2
    found = {name: value * branches for name, value in found.items()}
    if mode.cfg > 1:
        found["cfg"] = Fraction(
            family.tokens(size) * family.token_values * BYTES, mode.parts * mode.tensor
        )
    return found


def _formula(method: str, family: Family, tokens: Fraction, num_devices: int) -> Fraction:
    one = paper_bytes(
        method, tokens=1, width=family.width, layers=family.layers, num_devices=num_devices
    )
    return one * tokens


def _share(degree: int) -> Fraction:
    return Fraction(degree - 1, degree)

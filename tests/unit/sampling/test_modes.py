"""What is legal, against rules written down a second time, and that refusals say what to do."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.modes import AXES, Mode, check_mode, legal_modes
from lightning_dpipe.sampling.shapes import FAMILIES, FLUX, PIXART, SD3, Family


def legal(family: Family, rows: int, mode: Mode) -> bool:
    """The rules as one expression."""
    alone = mode.tensor > 1 or mode.distrifusion > 1
    others = [d for d in (mode.pipefusion, mode.ulysses, mode.ring) if d > 1]
    return (
        mode.cfg <= family.branches
        and family.heads % mode.ulysses == 0
        and family.heads % mode.tensor == 0
        and mode.pipefusion <= family.layers
        and mode.patches * mode.ulysses * mode.ring * mode.distrifusion <= rows
        and (mode.patches == 1 or mode.pipefusion > 1)
        and not (alone and others)
        and not (mode.tensor > 1 and mode.distrifusion > 1)
    )


degrees = st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8, 30, 60])


@given(
    st.sampled_from(list(FAMILIES.values())),
    st.integers(1, 70),
    st.builds(
        Mode, cfg=st.integers(1, 2), pipefusion=degrees, ulysses=degrees, ring=degrees,
        tensor=degrees, distrifusion=degrees, patches=degrees, warmup=st.integers(0, 3),
    ),
)  # fmt: skip
def test_check_mode_keeps_the_rules(family: Family, rows: int, mode: Mode) -> None:
    size = (rows * family.pixels, 512)
    if legal(family, rows, mode):
        check_mode(family, size, mode, steps=3)
    else:
        with pytest.raises(PlanError, match="cannot draw"):
            check_mode(family, size, mode, steps=3)


@pytest.mark.parametrize("num_devices", [1, 2, 5, 6, 8, 12])
@pytest.mark.parametrize(("family", "warmup"), [(PIXART, 0), (FLUX, 2)])
def test_legal_modes_are_all_of_them(family: Family, num_devices: int, warmup: int) -> None:
    found = legal_modes(family, 512, num_devices, steps=4, warmup=warmup, patches=(1, 4))
    assert len(set(found)) == len(found)
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    every = set()
    for degrees in itertools.product(divisors, repeat=len(AXES)):
        for patches in (1, 4):
            mode = Mode(**dict(zip(AXES, degrees, strict=True)), patches=patches, warmup=warmup)
            fits = mode.num_devices == num_devices and mode.cfg <= 2
            if fits and legal(family, 512 // family.pixels, mode):
                every.add(mode)
    assert set(found) == every


@pytest.mark.parametrize(
    ("family", "mode", "words"),
    [
        (FLUX, Mode(cfg=2), "cfg 2 for a model with 1 branches; use 1"),
        (PIXART, Mode(ulysses=3), "16 heads cannot be divided by ulysses 3; use one of .1, 2, 4"),
        (PIXART, Mode(pipefusion=29), "29 stages for 28 layers; use at most 28"),
        (SD3, Mode(pipefusion=2, patches=65), "65 patches x 1 parts for 64 rows of tokens"),
        (SD3, Mode(patches=2), "2 patches without a patch pipeline; use 1"),
        (SD3, Mode(tensor=2, ring=2), "combine with cfg only"),
        (SD3, Mode(warmup=21), "21 warm-up steps of 20; use 0 to 20"),
        (SD3, Mode(ring=0), "ring is 0; expected at least 1"),
        (SD3, Mode(ring=64), "needs 64 devices; there are 32"),
    ],
)
def test_a_refusal_has_both_numbers(family: Family, mode: Mode, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_mode(family, 1024, mode, steps=20, num_devices=32)


def test_no_mode_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match="no mode uses 61 devices for Flux-dev; last"):
        legal_modes(FLUX, 512, 61, steps=4)
    with pytest.raises(PlanError, match="0 devices; expected at least 1"):
        legal_modes(FLUX, 512, 0, steps=4)


def test_a_mode_says_what_it_is() -> None:
    assert str(Mode()) == "one device"
    mode = Mode(cfg=2, pipefusion=4, ulysses=2, patches=8)
    assert str(mode) == "cfg 2 x pipefusion 4 x ulysses 2 x 8 patches"
    assert (mode.num_devices, mode.parts) == (16, 2)

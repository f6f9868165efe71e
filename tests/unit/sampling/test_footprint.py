"""Memory against the table of the paper, and the two figures that decide who fits."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.footprint import lightest, memory, stage_layers
from lightning_dpipe.sampling.modes import Mode
from lightning_dpipe.sampling.shapes import DIT_XL_2, FAMILIES, FLUX, PIXART, Family

families = st.sampled_from(list(FAMILIES.values()))


@given(st.integers(1, 100), st.integers(1, 20))
def test_stages_are_even_and_whole(layers: int, stages: int) -> None:
    found = stage_layers(layers, stages)
    assert (len(found), sum(found)) == (stages, layers)
    assert max(found) - min(found) <= 1


def least_of_all_cuts(sizes: list[int], stages: int) -> int:
    """Brute force: the least largest sum of contiguous stages."""
    cuts = itertools.combinations(range(1, len(sizes)), stages - 1)
    return min(
        max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cut, len(sizes)))) for cut in cuts
    )


@given(families, st.sampled_from([256, 2048]), st.integers(1, 3), st.data())
def test_the_lightest_stages_are_the_lightest(
    family: Family, size: int, stages: int, data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(1, 5)) for _ in family.blocks]
    few = replace(
        family,
        blocks=tuple(replace(k, count=c) for k, c in zip(family.blocks, counts, strict=True)),
    )
    stages = min(stages, few.layers)
    held = lightest(few, size, Mode(pipefusion=stages))
    assert len(held) == stages
    assert sum(held, ()) == tuple(range(few.layers))
    assert all(held)
    sizes = [2 * kind.parameters + few.kv_bytes(size) for kind in few.kinds()]
    largest = max(sum(sizes[i] for i in blocks) for blocks in held)
    assert largest == least_of_all_cuts(sizes, stages)


@given(families, st.sampled_from([256, 1024, 2048]))
def test_keys_and_values_are_those_of_the_table(family: Family, size: int) -> None:
    one = 2 * family.branches * family.sequence(size) * family.width * 2
    expected = {
        Mode(): one,
        Mode(ulysses=4): one // 4,
        Mode(ring=4): one // 4,
        Mode(tensor=4): one // 4,
        Mode(distrifusion=4): one * family.layers,
    }
    assert {mode: memory(family, size, mode).keys_values for mode in expected} == expected
    staged = memory(family, size, Mode(pipefusion=4, patches=4)).keys_values
    assert staged in (one * (family.layers // 4), one * -(-family.layers // 4))


@given(families)
def test_weights_are_shared_by_stages_and_tensor_parallelism_only(family: Family) -> None:
    whole = 2 * family.parameters
    for mode in (Mode(), Mode(ulysses=4), Mode(ring=4), Mode(distrifusion=4)):
        assert memory(family, 512, mode).weights == whole
    blocks = 2 * sum(kind.count * kind.parameters for kind in family.blocks)
    assert memory(family, 512, Mode(tensor=4)).weights == whole - blocks + blocks // 4
    if len(family.blocks) == 1:
        most = -(-family.layers // 4) / family.layers
        staged = memory(family, 512, Mode(pipefusion=4)).weights
        assert staged == pytest.approx(whole - blocks + blocks * most)


def test_text_encoders_are_apart() -> None:
    found = memory(FLUX, 1024, Mode())
    assert found.text_encoder == 2 * (4_762_310_656 + 123_060_480)
    assert memory(DIT_XL_2, 256, Mode()).text_encoder == 0
    assert found.peak == found.weights + found.keys_values + found.activations


def test_both_branches_at_once_have_twice_the_keys_and_values() -> None:
    one, both = (memory(PIXART, 1024, Mode(cfg=cfg)) for cfg in (2, 1))
    assert 2 * one.keys_values == both.keys_values
    assert one.weights == both.weights


def test_pixart_8192_px_on_8_devices_fits_a_48_gb_card_as_pipefusion_only_of_the_stale_ones() -> (
    None
):
    card = 51_539_607_552
    assert memory(PIXART, 8192, Mode(distrifusion=8)).peak > card
    assert memory(PIXART, 8192, Mode(pipefusion=8, patches=8)).peak < card / 2


def test_flux_2048_px_on_8_devices_takes_a_fifth_of_what_sequence_parallelism_does() -> None:
    pipe = Mode(pipefusion=8, patches=8)
    whole = memory(FLUX, 2048, Mode(ulysses=8)).transformer
    held = lightest(FLUX, 2048, pipe)
    assert memory(FLUX, 2048, pipe, held=held).transformer <= 0.2 * whole
    assert max(map(len, held)) <= 9  # even stages have 8 layers, but the first only heavy ones
    assert 0.25 * whole < memory(FLUX, 2048, pipe).transformer < 0.27 * whole


def test_blocks_that_are_missing_or_held_twice_are_refused() -> None:
    for held in ([[0, 1]], [list(range(28)), [0]], [list(range(27)), []]):
        with pytest.raises(PlanError, match="expected 2 stages that hold each of 28 blocks once"):
            memory(PIXART, 512, Mode(pipefusion=2), held=held)

"""Keyed draws: same numbers for any split, independent otherwise, and really distributed so."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.objective.draws import coin, integers, normal, uniform


def keys_of(*rows: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, 2)


def grid(batches: int, slots: int) -> torch.Tensor:
    return torch.cartesian_prod(torch.arange(batches), torch.arange(slots))


def test_a_row_is_its_own_philox_stream_with_the_key_in_the_high_words() -> None:
    from hashlib import blake2b

    key = np.frombuffer(blake2b(b"7\0noise", digest_size=16).digest(), dtype="<u8")
    stream = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 5, 3]))
    expected = torch.from_numpy(stream.standard_normal((2, 4), dtype=np.float32))
    assert torch.equal(normal(7, "noise", keys_of((3, 5)), (2, 4))[0], expected)


@given(
    order=st.permutations(range(9)),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    draw=st.sampled_from(["normal", "uniform", "integers"]),
)
@settings(deadline=None, max_examples=30)
def test_any_split_and_order_of_the_rows_draws_the_same_numbers(
    order: list[int], cuts: list[int], draw: str
) -> None:
    def run(keys: torch.Tensor) -> torch.Tensor:
        if draw == "integers":
            return integers(1, "p", keys, 1000)
        return (normal if draw == "normal" else uniform)(1, "p", keys, (3, 5))

    keys = grid(3, 3)
    whole = run(keys)
    parts = torch.cat([run(part) for part in keys[order].tensor_split(sorted(cuts))])
    assert torch.equal(parts, whole[order])


def test_streams_of_neighbouring_keys_never_overlap() -> None:
    """With the key in the counter's low words, batch b + 1 repeats batch b from draw 4 on."""
    drawn = uniform(0, "p", grid(8, 8), (4096,)).flatten()
    repeated = len(drawn) - len(drawn.unique())
    # 2**18 draws of 24 bits: about 2048 repeats by chance; overlapping streams repeat most draws.
    assert repeated < 3000


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, "noise", (1, 2)), (1, "noise", (1, 2))),
        ((0, "noise", (1, 2)), (0, "timestep", (1, 2))),
        ((0, "noise", (1, 2)), (0, "noise", (2, 1))),
        ((0, "noise", (1, 2)), (0, "noise", (-1, 2))),
        ((1, "2noise", (1, 2)), (12, "noise", (1, 2))),
    ],
)
def test_seed_purpose_batch_and_slot_each_change_the_draw(
    first: tuple[int, str, tuple[int, int]], second: tuple[int, str, tuple[int, int]]
) -> None:
    a, b = (normal(seed, purpose, keys_of(key), (64,)) for seed, purpose, key in (first, second))
    assert abs(torch.corrcoef(torch.cat([a, b]))[0, 1]) < 0.5


def test_normal_numbers_have_the_moments_and_tails_of_a_normal_distribution() -> None:
    x = normal(0, "noise", grid(16, 16), (1024,)).double().flatten()
    error = len(x) ** -0.5
    assert abs(x.mean()) < 5 * error
    assert abs(x.var() - 1) < 5 * 2**0.5 * error
    assert abs((x.abs() > 2).double().mean() - 0.0455) < 5 * 0.2084 * error


def test_samples_are_uncorrelated() -> None:
    x = normal(0, "noise", grid(4, 8), (4096,)).double()
    correlation = torch.corrcoef(x) - torch.eye(len(x))
    assert correlation.abs().max() < 6 * 4096**-0.5


def test_integers_are_uniform_below_their_bound() -> None:
    counts = torch.bincount(integers(0, "timestep", grid(100, 100), 10), minlength=10)
    assert len(counts) == 10
    chi_square = ((counts - 1000).double() ** 2 / 1000).sum()
    assert chi_square < 33  # 99.99 % point at 9 degrees of freedom


def test_the_coin_is_fair_and_one_for_the_whole_batch() -> None:
    tosses = [coin(0, "self_conditioning", batch) for batch in range(2000)]
    assert all(0 <= toss < 1 for toss in tosses)
    assert abs(np.mean(tosses) - 0.5) < 5 * 0.289 * 2000**-0.5
    assert tosses[7] == coin(0, "self_conditioning", 7)


def test_another_process_draws_the_same_numbers() -> None:
    """Python's own hash() of a purpose would differ, for it is salted per process."""
    code = (
        "import torch; from lightning_dpipe.objective.draws import normal, coin;"
        "print(normal(3, 'noise', torch.tensor([[4, 5]]), (2,)).tolist(), coin(3, 'c', 9))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = normal(3, "noise", keys_of((4, 5)), (2,)).tolist()
    assert out.strip() == f"{here} {coin(3, 'c', 9)}"


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    normal(0, "a", grid(2, 2), (8,))
    uniform(0, "a", grid(2, 2))
    integers(0, "a", grid(2, 2), 9)
    coin(0, "a", 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_shapes_dtypes_and_the_empty_batch() -> None:
    keys = grid(1, 3)
    assert normal(0, "a", keys, (2, 4)).shape == (3, 2, 4)
    assert normal(0, "a", keys, ()).shape == (3,)
    assert uniform(0, "a", keys).shape == (3,)
    assert uniform(0, "a", keys).dtype is torch.float32
    assert integers(0, "a", keys, 5).dtype is torch.int64
    assert normal(0, "a", keys[:0], (2,)).shape == (0, 2)


def test_a_fake_tensor_trace_sees_shapes_without_drawing() -> None:
    with FakeTensorMode():
        keys = torch.empty(3, 2, dtype=torch.int64)
        assert normal(0, "a", keys, (2, 4)).shape == (3, 2, 4)
        assert uniform(0, "a", keys).dtype is torch.float32
        assert integers(0, "a", keys, 5).dtype is torch.int64


def test_wrong_keys_and_bounds_are_refused() -> None:
    with pytest.raises(SpecError, match=r"draw keys are torch.float32 \[3, 2\]"):
        normal(0, "a", torch.zeros(3, 2), ())
    with pytest.raises(SpecError, match=r"torch.int64 \[3\]"):
        uniform(0, "a", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(SpecError, match="drawn below 0"):
        integers(0, "a", grid(1, 1), 0)

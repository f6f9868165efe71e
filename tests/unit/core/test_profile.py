"""Costs: between and beyond the profiled sizes, and of messages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.profile import Link, interpolate
from synthetic import FrozenChain, model_profile


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 200))
def test_a_line_is_found_again_at_every_size(fixed, slope, samples) -> None:
    sizes = (4, 8, 32)
    costs = tuple(fixed + slope * n for n in sizes)
    assert interpolate(sizes, costs, samples) == (fixed + slope * samples if samples else 0)


def test_one_profiled_size_is_taken_as_proportional() -> None:
    assert interpolate((8,), (80,), 2) == 20


def test_a_negative_count_is_named() -> None:
    with pytest.raises(ProfileError, match="the cost of -1 samples"):
        interpolate((8,), (80,), -1)


def test_a_message_costs_its_sender_a_fixed_time_and_the_copy() -> None:
    free = Link(latency_us=5, bytes_per_s=10**9)
    copied = Link(latency_us=5, bytes_per_s=10**9, host_us=7, host_bytes_per_s=2 * 10**9)
    assert free.send_us(10**6) == 0
    assert copied.send_us(10**6) == 7 + 500
    assert copied.transfer_us(10**6) == free.transfer_us(10**6) == 5 + 1000


PROFILE = model_profile((3, 5), frozen=(FrozenChain(name="text", forward_us=(4,)),))


def with_layer(**changes: object) -> None:
    text, net = PROFILE.costs
    replace(PROFILE, costs=(text, replace(net, layers=(replace(net.layers[0], **changes),) * 2)))


def test_costs_are_figures_of_at_least_0_one_per_profiled_size() -> None:
    net = PROFILE.component("net")
    for samples in ((), (0, 1), (4, 2), (2, 2)):
        with pytest.raises(ProfileError, match="expected ascending sizes"):
            replace(net, samples=samples)
    with pytest.raises(ProfileError, match=r"forward_us of layer 'layer0' of 'net' is \[1, 2\]; "):
        with_layer(forward_us=(1, 2))
    with pytest.raises(ProfileError, match="expected 7 figures of at least 0"):
        with_layer(activation_bytes=(1, 2, 3, 4, 5, 6, -1))
    with pytest.raises(ProfileError, match="param_bytes of layer 'layer0' of 'net' is -1"):
        with_layer(param_bytes=-1)


def test_a_profile_has_the_costs_of_its_models_layers() -> None:
    text, net = PROFILE.costs
    with pytest.raises(ProfileError, match="costs of 1 layers of 'net', its model has 2"):
        replace(PROFILE, costs=(text, replace(net, layers=net.layers[:1])))
    with pytest.raises(ProfileError, match="two have one name"):
        replace(PROFILE, costs=(text, text, net))
    with pytest.raises(ProfileError, match="fill_us of the profile is -1"):
        replace(PROFILE, fill_us=-1)
    with pytest.raises(ProfileError, match="memory_bytes of the profile is -5"):
        replace(PROFILE, memory_bytes=-5)


def test_a_link_moves_bytes() -> None:
    with pytest.raises(ProfileError, match="bytes_per_s of a link is 0; expected at least 1"):
        Link(latency_us=0, bytes_per_s=0)
    with pytest.raises(ProfileError, match="latency_us of a link is -1"):
        Link(latency_us=-1, bytes_per_s=1)

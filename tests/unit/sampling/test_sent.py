"""Bytes against a count of every message, and against the papers' formulas."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.sampling.modes import Mode
from lightning_dpipe.sampling.sent import paper_bytes, sent_bytes
from lightning_dpipe.sampling.shapes import DIT_XL_2, FAMILIES, FLUX, Family

families = st.sampled_from(list(FAMILIES.values()))
sizes = st.integers(1, 8).map(lambda n: 256 * n)


def messages(method: str, tokens: int, width: int, layers: int, n: int) -> Fraction:
    """Send what the algorithm sends, message by message: bytes of rank 0."""
    part = Fraction(tokens, n)
    total = Fraction(0)
    for _ in range(layers):
        if method == "tensor":
            for _ in ("attention", "mlp"):
                for _ in ("reduce", "gather"):
                    for _hop in range(n - 1):
                        total += part * width
        elif method == "ulysses":
            for _ in ("query", "key", "value", "result"):
                for _peer in range(n - 1):
                    total += part * Fraction(width, n)
        else:  # ring and DistriFusion: own keys and values, or others', to the neighbour
            for _hop in range(n - 1):
                for _ in ("key", "value"):
                    total += part * width
    return total * 2


@given(
    families,
    sizes,
    st.integers(2, 16),
    st.sampled_from(["tensor", "ulysses", "ring", "distrifusion"]),
)
def test_every_message_is_counted(family: Family, size: int, n: int, method: str) -> None:
    tokens = family.tokens(size) if method == "distrifusion" else family.sequence(size)
    expected = messages(method, tokens, family.width, family.layers, n) * family.branches
    sent = sent_bytes(family, size, Mode(**{method: n}))
    assert sent == {method: expected}
    formula = paper_bytes(
        method, tokens=tokens, width=family.width, layers=family.layers, num_devices=n
    )
    assert expected == formula * family.branches * Fraction(n - 1, n)


@given(families, sizes, st.integers(2, 16), st.integers(1, 8))
def test_pipefusion_sends_each_token_once_whatever_the_stages(
    family: Family, size: int, stages: int, patches: int
) -> None:
    sent = sent_bytes(family, size, Mode(pipefusion=stages, patches=patches))
    whole = family.sequence(size) * family.width * 2 * family.branches
    assert sent == {"pipefusion": whole}
    formula = paper_bytes(
        "pipefusion",
        tokens=family.sequence(size),
        width=family.width,
        layers=family.layers,
        num_devices=stages,
    )
    assert 2 * whole == formula * family.branches  # the paper counts what is received too


def test_the_formulas_of_the_paper() -> None:
    # p = 10 tokens, width 6, 3 layers, 4 devices, 2 bytes: p w = 60.
    found = {
        method: paper_bytes(method, tokens=10, width=6, layers=3, num_devices=4)
        for method in ("tensor", "distrifusion", "ring", "ulysses", "pipefusion")
    }
    assert found == {
        "tensor": 4 * 60 * 3 * 2,
        "distrifusion": 2 * 60 * 3 * 2,
        "ring": 2 * 60 * 3 * 2,
        "ulysses": 60 * 3 * 2,  # 4 / 4
        "pipefusion": 2 * 60 * 2,
    }
    with pytest.raises(PlanError, match=r"'gossip'.*tensor, distrifusion"):
        paper_bytes("gossip", tokens=1, width=1, layers=1, num_devices=1)


def test_one_device_sends_nothing() -> None:
    assert sent_bytes(FLUX, 1024, Mode()) == {}


def test_hybrids_share_what_their_axes_send() -> None:
    size, layer = 1024, DIT_XL_2.sequence(1024) * DIT_XL_2.width * 2 * 28
    sent = sent_bytes(DIT_XL_2, size, Mode(cfg=2, ulysses=4, ring=2))
    # One branch; a group of 4 has half the tokens; the ring passes a quarter of the heads.
    assert sent["ulysses"] == Fraction(layer * 4, 4 * 2) * Fraction(3, 4)
    assert sent["ring"] == Fraction(2 * layer, 4) * Fraction(1, 2)
    assert sent["cfg"] == Fraction(4096 * 16 * 2, 8)
    piped = sent_bytes(DIT_XL_2, size, Mode(pipefusion=4, ulysses=2, patches=4))
    assert piped["ulysses"] == Fraction(2 * layer, 4 * 2) * 2  # two branches, 7 of 28 layers
    assert piped["pipefusion"] == DIT_XL_2.sequence(1024) * DIT_XL_2.width * 2
    rings = sent_bytes(DIT_XL_2, size, Mode(pipefusion=4, ring=2, patches=4))
    assert rings["ring"] == Fraction(2 * layer, 4 * 2) * 4 * 2  # all keys go round for every patch

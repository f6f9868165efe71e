"""Rows of micro-batches: every sample once, in slot order, as contiguous local ranges."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dpipe.core.fills import MIN_CHUNK_BYTES
from lightning_dpipe.core.plan import default_groups
from lightning_dpipe.lowering.rows import layout

sizes_and_parts = (
    st.lists(st.integers(0, 7), min_size=1, max_size=5)
    .filter(any)
    .flatmap(lambda sizes: st.tuples(st.just(tuple(sizes)), st.integers(1, sum(sizes))))
)


@given(sizes_and_parts)
def test_parts_rebuild_the_joint_batch_in_slot_order(case) -> None:
    sizes, parts = case
    group = default_groups(len(sizes), len(sizes))[0]
    cut = layout(sizes, group, parts)
    local = [
        torch.tensor([i * len(sizes) + group[d] for i in range(n)]) for d, n in enumerate(sizes)
    ]
    rebuilt = []
    for m in range(parts):
        rows = torch.full((cut.rows(m),), -1)
        for p in cut.parts(m, (0, cut.rows(m))):
            count = p.last - p.first
            rows[p.start : p.start + (count - 1) * p.step + 1 : p.step] = local[p.device][
                p.first : p.last
            ]
        rebuilt.append(rows)
    slots = sorted(int(x) for xs in local for x in xs)
    assert torch.cat(rebuilt).tolist() == slots
    assert [len(x) for x in rebuilt] == [len(x) for x in torch.tensor(slots).tensor_split(parts)]


@given(sizes_and_parts, st.sampled_from([1, 1000, MIN_CHUNK_BYTES]))
def test_chunks_cover_a_local_batch_once_and_small_ones_are_joined(case, bytes_per_sample) -> None:
    sizes, parts = case
    cut = layout(sizes, tuple(range(len(sizes))), parts)
    shares = [(0, cut.rows(m)) for m in range(parts)]
    for device, size in enumerate(sizes):
        chunks = cut.chunks(device, shares, bytes_per_sample)
        assert [i for first, last in chunks for i in range(first, last)] == list(range(size))
        assert all((b - a) * bytes_per_sample >= MIN_CHUNK_BYTES for a, b in chunks[:-1])


def test_equal_batches_need_one_part_a_device() -> None:
    cut = layout((8, 8), (1, 0), 4)
    assert [len(cut.parts(m, (0, cut.rows(m)))) for m in range(4)] == [2, 2, 2, 2]
    first = cut.parts(0, (0, 4))
    # Rank 0 (device 1) owns the even slots.
    assert [(p.device, p.start, p.step) for p in first] == [(0, 1, 2), (1, 0, 2)]

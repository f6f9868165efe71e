"""Buffers of many programs in one set of storages."""

import random

import torch

from lightning_dpipe.core.program import BufferSpec, Program, StepShape
from lightning_dpipe.runtime.pool import BufferPool, buffer_bytes


def program(*buffers: BufferSpec) -> Program:
    return Program(
        rank=0, device=0, shape=StepShape(sizes=(1,)), num_slots=0, buffers=buffers,
        instructions=(),
    )  # fmt: skip


def spec(*shape: int, dtype: str = "float32") -> BufferSpec:
    return BufferSpec(shape=shape, dtype=dtype)


def test_a_programs_buffers_do_not_overlap_and_have_their_shapes() -> None:
    draw = random.Random(0)
    pool = BufferPool(torch.device("cpu"))
    programs = [
        program(
            *(
                spec(draw.randint(0, 5), draw.randint(1, 9), dtype=draw.choice(("int64", "bool")))
                for _ in range(draw.randint(0, 8))
            )
        )
        for _ in range(20)
    ]
    for at in [*range(20), *range(20)]:
        views = pool.of(programs[at])
        assert [tuple(v.shape) for v in views] == [b.shape for b in programs[at].buffers]
        for i, view in enumerate(views):
            view.fill_(i % 2)
        for i, view in enumerate(views):
            assert bool((view == i % 2).all())
    sizes = [sorted((buffer_bytes(b) for b in p.buffers), reverse=True) for p in programs]
    largest = [max((s[k] for s in sizes if k < len(s)), default=0) for k in range(8)]
    assert pool.num_bytes == sum(largest)


def test_a_program_asked_for_again_has_the_same_memory_until_one_needs_more() -> None:
    pool = BufferPool(torch.device("cpu"))
    small, large = program(spec(4)), program(spec(9))
    (first,) = pool.of(small)
    assert pool.of(small)[0] is first
    (grown,) = pool.of(large)
    assert pool.of(small)[0].data_ptr() == grown.data_ptr()
    assert pool.num_bytes == 36
    pool.forget()
    assert pool.num_bytes == 36
    assert pool.of(large)[0].data_ptr() == grown.data_ptr()

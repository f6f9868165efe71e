"""The closed form against an event simulation of patches, and its limits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.profile import Link
from lightning_dpipe.sampling.costs import _Model, estimate
from lightning_dpipe.sampling.hardware import NVLINK, Hardware
from lightning_dpipe.sampling.modes import Mode, legal_modes
from lightning_dpipe.sampling.shapes import DIT_XL_2, FAMILIES, FLUX, PIXART, SD3, Family

DEVICE = Device(
    name="toy",
    flops_per_s={"bfloat16": 10**14},
    memory_bytes=10**11,
    memory_bytes_per_s=10**12,
    max_efficiency=0.5,
    half_efficiency_flops=10**9,
    memory_efficiency=0.8,
    launch_us=5,
)


def hardware(nodes: int = 1, bytes_per_s: int = 10**10, launch_us: int = 5) -> Hardware:
    cluster = Cluster(
        name="toy",
        nodes=nodes,
        devices_per_node=8,
        device=replace(DEVICE, launch_us=launch_us),
        inside=Link(latency_us=20, bytes_per_s=bytes_per_s, host_us=3),
        between=Link(latency_us=50, bytes_per_s=10**9, host_us=7),
        nic_bytes_per_s=10**9,
    )
    return Hardware(cluster=cluster, inside=NVLINK)


families = st.sampled_from(list(FAMILIES.values()))
sizes = st.sampled_from([512, 1024, 2048])


def simulate(model: _Model) -> float:
    """Every patch of every stale step through every stage and link, one after the other."""
    first, other = model._stages(model.mode.patches)
    link, latency = model._link(model.mode.patches)
    stages, patches = model.mode.pipefusion, model.mode.patches
    stage_free, link_free = [0.0] * stages, [0.0] * stages
    back = [0.0] * patches
    for _ in range(model.steps - model.mode.warmup):
        for m in range(patches):
            at = back[m]
            for k in range(stages):
                at = max(at, stage_free[k]) + (first if m == 0 else other)[k]
                stage_free[k] = at
                at = max(at, link_free[k]) + link
                link_free[k] = at
                at += latency
            back[m] = at
    return max(back)


@given(
    families, sizes, st.integers(2, 8), st.integers(1, 16), st.integers(1, 6),
    st.sampled_from([10**8, 10**9, 10**10, 10**12]),
)  # fmt: skip
def test_patches_take_as_long_as_if_each_is_followed(
    family: Family, size: int, stages: int, patches: int, steps: int, bytes_per_s: int
) -> None:
    mode = Mode(pipefusion=stages, patches=patches, warmup=0)
    model = _Model(
        family=family,
        size=size,
        hardware=hardware(bytes_per_s=bytes_per_s),
        mode=mode,
        steps=steps,
    )
    followed = simulate(model)
    # Stages of unlike layers make the closed form an upper bound by less than one period.
    assert followed <= model.total_us() * (1 + 1e-9)
    if family.layers % stages == 0 and len(family.blocks) == 1:
        assert model.total_us() == pytest.approx(followed, rel=1e-9)
    else:
        assert model.total_us() <= followed * (1 + 1 / steps)


@given(families, sizes, st.integers(1, 50))
def test_one_device_is_the_sum_of_its_kernels(family: Family, size: int, steps: int) -> None:
    made = hardware(launch_us=0)
    cost = estimate(family, size, made, Mode(), steps=steps)
    tokens, text = family.tokens(size), family.sequence_text
    best = 10**14 * 0.5
    expected = 0.0
    for kind in family.blocks:
        products = family.products(kind, tokens, text, tokens + text)
        kernels = sum(family.branches * flops + 10**9 for flops in products) / best
        rows = family.branches * (tokens + (text if kind.attention.has_text_rows else 0))
        expected += kind.count * (kernels + 26 * rows * family.width * 2 / (0.8 * 10**12))
    assert cost.total_us == pytest.approx(steps * expected * 1e6, rel=1e-6)
    assert cost.free_us == cost.busy_us == cost.total_us
    assert (cost.sent_bytes, cost.transfer_share, cost.idle_share) == ({}, 0, 0)
    assert cost.flops == family.step_flops(size)


@settings(max_examples=12, deadline=None)
@given(families, st.sampled_from([2, 4, 8]), st.integers(0, 3))
def test_with_free_links_there_is_compute_only(family: Family, num: int, warmup: int) -> None:
    made = hardware()
    for mode in legal_modes(family, 1024, num, steps=5, warmup=warmup, patches=(1, 4)):
        cost = estimate(family, 1024, made, mode, steps=5)
        free = estimate(family, 1024, made.with_free_links(), mode, steps=5)
        assert cost.free_us == pytest.approx(free.total_us)
        assert free.transfer_share == pytest.approx(0)
        assert cost.total_us >= free.total_us * (1 - 1e-12)
        assert cost.busy_us <= cost.free_us * (1 + 1e-12)
        if mode.pipefusion == 1:
            assert free.idle_share == 0


@settings(max_examples=12, deadline=None)
@given(families, st.sampled_from([2, 4, 8]), st.integers(0, 2))
def test_a_slower_link_is_never_faster(family: Family, num: int, warmup: int) -> None:
    fast, slow = hardware(bytes_per_s=10**10), hardware(bytes_per_s=2 * 10**9)
    for mode in legal_modes(family, 512, num, steps=4, warmup=warmup, patches=(1, 4)):
        costs = [estimate(family, 512, made, mode, steps=4).total_us for made in (fast, slow)]
        assert costs[0] <= costs[1] * (1 + 1e-12), mode


@settings(max_examples=20, deadline=None)
@given(families, sizes, st.sampled_from([2, 4, 8]))
def test_devices_share_the_arithmetic(family: Family, size: int, num: int) -> None:
    whole = family.step_flops(size)
    for mode in legal_modes(family, size, num, steps=4, patches=(4,)):
        flops = estimate(family, size, hardware(), mode, steps=4).flops
        assert flops >= whole / num * 0.999
        most = -(-family.layers // mode.pipefusion) * mode.pipefusion / family.layers
        text = family.sequence_text if mode.distrifusion > 1 else 0
        slack = most * (1 + mode.parts * (text + 1) / family.tokens(size))
        assert flops <= whole / num * slack * 1.001


def test_warm_up_of_all_steps_runs_whole_images_only() -> None:
    made = hardware()
    one = estimate(PIXART, 1024, made, Mode(), steps=4)
    piped = estimate(PIXART, 1024, made, Mode(pipefusion=4, patches=4, warmup=4), steps=4)
    transfers = 4 * 4 * (2 * 4096 * 1152 * 2 / 10**10 * 1e6 + 20)
    assert piped.total_us == pytest.approx(one.total_us + transfers)


def test_efficiency_of_the_patch_pipeline_is_the_papers_when_kernels_are_ideal() -> None:
    # P T / (P T + N - 1): free links, no launches, no small-kernel loss, stages alike.
    device = replace(DEVICE, half_efficiency_flops=0, launch_us=0)
    made = hardware().with_free_links()
    made = replace(made, cluster=replace(made.cluster, device=device))
    for stages, patches, steps in ((4, 4, 5), (4, 8, 20), (7, 7, 3)):
        mode = Mode(pipefusion=stages, patches=patches, warmup=0)
        cost = estimate(DIT_XL_2, (patches * 64, 512), made, mode, steps=steps)
        units = patches * steps
        assert 1 - cost.idle_share == pytest.approx(units / (units + stages - 1))


def test_a_ring_hides_its_transfers_when_attention_is_long_enough() -> None:
    exposed = {
        size: estimate(SD3, size, hardware(launch_us=0), Mode(ring=4)).transfer_share
        for size in (512, 4096)
    }
    assert exposed[4096] < 0.1
    assert exposed[512] > 0.4


def test_pipelines_reach_over_nodes_before_sequence_parallelism_does() -> None:
    two = hardware(nodes=2, bytes_per_s=10**11)
    both = {
        mode: estimate(FLUX, 1024, two, mode).transfer_share
        for mode in (Mode(pipefusion=2, ulysses=8, patches=4), Mode(ulysses=8, ring=2))
    }
    piped, ringed = both.values()
    assert piped < ringed / 2


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="needs 16 devices; there are 8"):
        estimate(FLUX, 1024, hardware(), Mode(pipefusion=16))

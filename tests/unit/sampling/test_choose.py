"""The choice is never slower in the model than another mode that was allowed, and says why."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.profile import Link
from lightning_dpipe.sampling.choose import CLASSES, choose, class_of
from lightning_dpipe.sampling.costs import estimate
from lightning_dpipe.sampling.hardware import NVLINK, Hardware
from lightning_dpipe.sampling.modes import Mode, legal_modes
from lightning_dpipe.sampling.shapes import DIT_XL_2, FAMILIES, FLUX, PIXART, Family

families = st.sampled_from(list(FAMILIES.values()))


def hardware(bytes_per_s: int = 10**10, memory_bytes: int = 10**12, nodes: int = 1) -> Hardware:
    device = Device(
        name="toy",
        flops_per_s={"bfloat16": 10**14},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=10**12,
        max_efficiency=0.5,
        half_efficiency_flops=10**9,
        memory_efficiency=0.8,
        launch_us=5,
    )
    cluster = Cluster(
        name="toy",
        nodes=nodes,
        devices_per_node=8,
        device=device,
        inside=Link(latency_us=20, bytes_per_s=bytes_per_s, host_us=3),
        between=Link(latency_us=50, bytes_per_s=10**9, host_us=7),
        nic_bytes_per_s=10**9,
    )
    return Hardware(cluster=cluster, inside=NVLINK)


@settings(max_examples=15, deadline=None)
@given(
    families, st.sampled_from([512, 1024]), st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([10**8, 10**10, 3 * 10**11]), st.integers(0, 2), st.booleans(),
)  # fmt: skip
def test_no_allowed_mode_is_faster(
    family: Family, size: int, num: int, bytes_per_s: int, warmup: int, exact: bool
) -> None:
    made = hardware(bytes_per_s)
    found = choose(family, made, size, steps=6, num_devices=num, warmup=warmup, exact=exact)
    assert not (exact and found.mode.stale)
    assert found.mode.num_devices == num
    for mode in legal_modes(family, size, num, steps=6, warmup=warmup):
        if not (exact and mode.stale):
            cost = estimate(family, size, made, mode, steps=6)
            assert found.best.total_us <= cost.total_us * (1 + 1e-8), mode
    assert [cost.total_us for _, cost in found.by_class] == sorted(
        cost.total_us for _, cost in found.by_class
    )


@given(families, st.sampled_from([1, 4, 6, 8]))
def test_every_mode_is_of_one_class(family: Family, num: int) -> None:
    for mode in legal_modes(family, 512, num, steps=2):
        assert [holds(mode) for holds in CLASSES.values()].count(True) == 1
        assert CLASSES[class_of(mode)](mode)


def test_slow_links_make_it_a_pipeline_and_fast_ones_sequence_parallelism() -> None:
    slow = choose(FLUX, hardware(10**9), 1024)
    fast = choose(FLUX, hardware(3 * 10**11), 1024)
    assert slow.mode.methods == {"pipefusion"}
    assert fast.mode.methods <= {"ulysses", "ring"}
    assert "PipeFusion" in " ".join(fast.reasons)
    assert "one step old" in " ".join(slow.reasons)
    assert "one step old" not in " ".join(fast.reasons)


def test_one_device_has_one_way() -> None:
    assert choose(DIT_XL_2, hardware(), 256, num_devices=1).mode == Mode()


def test_what_does_not_fit_is_left_out_and_named() -> None:
    # 8192 px: DistriFusion keeps the keys and values of all layers on every device.
    made = hardware(memory_bytes=30 * 10**9)
    found = choose(PIXART, made, 8192, patches=(8,))
    assert found.best.memory.peak <= 30 * 10**9
    assert "DistriFusion" not in dict(found.by_class)
    assert any(r.startswith("DistriFusion does not fit: ") for r in found.reasons)
    with pytest.raises(PlanError, match=r"needs .* GB a device, toy has 0.0 GB; use more devices"):
        choose(PIXART, hardware(memory_bytes=10**6), 1024)


def test_exact_images_leave_stale_modes_out() -> None:
    found = choose(PIXART, hardware(10**8), 1024, exact=True)
    assert not found.mode.stale
    assert "stale modes were not allowed" in found.reasons[-1]


def test_of_equal_modes_the_simplest_is_taken() -> None:
    # No link, launch or small-kernel cost: all exact ways to cut PixArt evenly take equally long.
    made = hardware().with_free_links()
    device = replace(made.device, half_efficiency_flops=0, launch_us=0)
    made = replace(made, cluster=replace(made.cluster, device=device))
    assert len(choose(PIXART, made, 1024, exact=True, num_devices=4).mode.methods) == 1

"""Cluster files are read whole or refused by field; figures follow from them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.errors import ClusterError
from lightning_dpipe.core.jsonio import load, save

FILES = sorted((Path(__file__).parents[3] / "conf" / "cluster").glob("*.yaml"))
DATA: dict[str, Any] = {
    "name": "two",
    "nodes": 2,
    "devices_per_node": 4,
    "device": {
        "name": "chip",
        "flops_per_s": {"bfloat16": 1_000_000, "float32": 500_000},
        "memory_bytes": 1000,
        "memory_bytes_per_s": 1_000_000,
        "max_efficiency": 0.5,
        "half_efficiency_flops": 100,
        "memory_efficiency": 1.0,
        "launch_us": 0,
    },
    "inside": {"latency_us": 1, "bytes_per_s": 100},
    "between": {"latency_us": 5, "bytes_per_s": 30, "host_us": 2},
    "nic_bytes_per_s": 40,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_clusters_that_ship_are_valid_and_named_after_their_file(
    path: Path, tmp_path: Path
) -> None:
    cluster = Cluster.from_mapping(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    assert cluster.name == path.stem
    save(cluster, tmp_path / "cluster.json")
    assert load(Cluster, tmp_path / "cluster.json") == cluster


def test_the_clusters_that_ship() -> None:
    names = ["a100_4_l40_4", "cpu_2", "h100_8", "h200_8", "l40_2x8", "l40_8", "p4de_8x8"]
    assert [p.stem for p in FILES] == names


def test_nodes_may_have_devices_of_several_kinds() -> None:
    slow = DATA["device"] | {"name": "slow chip"}
    cluster = Cluster.from_mapping(DATA | {"others": [slow], "node_kinds": [1, 0]})
    assert cluster.kinds == (1, 1, 1, 1, 0, 0, 0, 0)
    assert Cluster.from_mapping(DATA).kinds == ()
    for wrong in ({"others": [slow]}, {"node_kinds": [0, 1]}):
        with pytest.raises(ClusterError, match="name the kind of every node"):
            Cluster.from_mapping(DATA | wrong)
    for kinds in ([0], [0, 0], [0, 2]):
        with pytest.raises(ClusterError, match="for 2 nodes and 2 kinds"):
            Cluster.from_mapping(DATA | {"others": [slow], "node_kinds": kinds})
    with pytest.raises(ClusterError, match="its device of kind 1 lacks"):
        Cluster.from_mapping(DATA | {"others": [{"name": "slow"}], "node_kinds": [0, 1]})


def test_ranks_are_numbered_node_by_node_and_links_follow() -> None:
    cluster = Cluster.from_mapping(DATA)
    assert cluster.world_size == 8
    assert [cluster.node_of(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cluster.link(0, 3) == cluster.inside
    assert cluster.link(3, 4) == cluster.link(4, 3) == cluster.between
    with pytest.raises(ClusterError, match="rank 8 is not in cluster 'two' of 8 devices"):
        cluster.node_of(8)


def test_rings_side_by_side_share_the_network_card() -> None:
    cluster = Cluster.from_mapping(DATA)
    assert cluster.ring(1, side_by_side=4) == cluster.inside
    assert cluster.ring(2).bytes_per_s == 40
    assert cluster.ring(2, side_by_side=4).bytes_per_s == 10
    assert cluster.ring(2).latency_us == 5


def test_efficiency_grows_with_the_kernel_towards_its_maximum() -> None:
    device = Cluster.from_mapping(DATA).device
    # 100 of 100 + 100 FLOPs: half of half the peak.
    assert device.matrix_us(100, "bfloat16") == pytest.approx(100 / (1e6 * 0.25) * 1e6)
    big = 10**9
    assert device.matrix_us(big, "float32") == pytest.approx(big / (5e5 * 0.5) * 1e6, rel=1e-6)
    assert device.matrix_us(0, "float32") == 0
    assert device.memory_us(500) == pytest.approx(500.0)
    with pytest.raises(ClusterError, match="no flops_per_s for float16, only for bfloat16"):
        device.matrix_us(1, "float16")


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        data = data[name]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nodes", 0, "nodes of cluster 'two' is 0; expected a whole number above 0"),
        ("nodes", 1.5, "nodes of cluster 'two' is 1.5; expected a whole number"),
        ("nodes", "8", "nodes of cluster 'two' is '8'"),
        ("nodes", True, "nodes of cluster 'two' is True"),
        ("device.memory_bytes", -1, "memory_bytes of device 'chip' is -1"),
        ("device.max_efficiency", 1.2, "max_efficiency of device 'chip' is 1.2; expected a share"),
        ("device.flops_per_s", {}, "device 'chip' has no flops_per_s"),
        ("device.flops_per_s", {"tf32": 1}, "names 'tf32'; known: float64"),
        ("device.flops_per_s", {"float32": "1e12"}, r"flops_per_s\[float32\] .* is '1e12'"),
        ("between.bytes_per_s", 0, "bytes_per_s of link between of cluster 'two' is 0"),
        ("between.speed", 3, "its link 'between' has no field 'speed'"),
        ("gpus", 3, "the cluster has no field 'gpus'"),
        ("nic_bytes_per_s", float("nan"), "nic_bytes_per_s of cluster 'two' is nan"),
        ("device.memory_efficiency", float("nan"), "memory_efficiency of device 'chip' is nan"),
        ("device.flops_per_s", {"float32": float("inf")}, r"flops_per_s\[float32\] .* is inf"),
        ("device.flops_per_s", 3, "device 'chip' has no flops_per_s"),
        ("between.latency_us", "x", "latency_us of link between of cluster 'two' is 'x'"),
        ("others", 3, "others of the cluster is 3; expected a list of devices"),
        ("node_kinds", ["a", 0], "node_kinds of the cluster is .*; expected a list of numbers"),
        ("device", "A100", "its device is 'A100'; expected a mapping of name, flops_per_s"),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_is_refused_by_name(path: str, value: Any, message: str) -> None:
    data = deepcopy(DATA)
    _set(data, path, value)
    with pytest.raises(ClusterError, match=message):
        Cluster.from_mapping(data)


def test_missing_fields_are_named() -> None:
    data = {k: v for k, v in deepcopy(DATA).items() if k != "nodes"}
    with pytest.raises(ClusterError, match="the cluster lacks nodes"):
        Cluster.from_mapping(data)
    data = deepcopy(DATA)
    del data["device"]["launch_us"]
    with pytest.raises(ClusterError, match="its device lacks launch_us"):
        Cluster.from_mapping(data)


def test_many_flows_over_the_slowest_card_are_slow_but_move() -> None:
    data = deepcopy(DATA)
    data["nic_bytes_per_s"] = 1
    assert Cluster.from_mapping(data).ring(2, side_by_side=4).bytes_per_s == 1

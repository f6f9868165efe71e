"""Bytes on each node's network card: data parallelism, stages inside a node, stages across nodes.

    python -m benchmarks.mapping [--quick] [--json]

On paper: Stable Diffusion 2.1 at 512 px (estimated profile, conf/profiles) on 2 and 8 nodes of 8
A100 (conf/cluster/p4de_8x8.yaml), 8 and 32 samples a device. Gradients are summed inside each node
first. Pipelines of 8 stages are placed in every regular layout (k stages of each on a node), and as
`make_plan` with the cluster chooses. card_ms is what the bytes take at the card's full speed. Each
placement has its own fills.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.common import Report, parser, show
from benchmarks.planner import CONF, cluster_of, shape_of
from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.mapping import place
from lightning_dpipe.planning.network import network_of
from lightning_dpipe.planning.placement import card_bytes, layouts, nodes_of, placed
from lightning_dpipe.planning.search import make_plan, with_fills
from lightning_dpipe.planning.variants import expected_us

NUM_STAGES = 8
INSIDE = "stages inside a node"


def rows_of(profile: Profile, cluster: Cluster, batch_size: int) -> Iterator[dict[str, Any]]:
    """One row a placement; `gap` is how far the exact search left off from its bound."""
    options: dict[str, Any] = {"world_size": cluster.world_size, "batch_size": batch_size}
    plan = make_plan(profile, num_stages=NUM_STAGES, **options)
    mapped = place(plan, profile, cluster)
    chosen = make_plan(profile, num_stages=NUM_STAGES, network=network_of(cluster), **options)
    plans = {"ddp": make_plan(profile, num_stages=1, num_microbatches=1, **options)}
    for groups in layouts(cluster.world_size, NUM_STAGES, cluster):
        plans[name_of(groups[0], cluster)] = replace(plan, groups=groups)
    for name, at in {**plans, "mapped": chosen}.items():
        seen = placed(profile, at, cluster)
        busiest = max(card_bytes(at, profile, cluster))
        yield {
            "devices": f"{cluster.nodes}x{cluster.devices_per_node}",
            "batch": batch_size,
            "placement": name,
            "plan": shape_of(at),
            "card_MB": busiest / 1e6,
            "card_ms": busiest / cluster.nic_bytes_per_s * 1e3,
            "iteration_ms": expected_us(with_fills(at, seen), seen) / 1e3,
            "gap": mapped.iteration_us / mapped.bound_us - 1 if name == "mapped" else "",
        }


def name_of(group: tuple[int, ...], cluster: Cluster) -> str:
    """What a layout does with the stages of a pipeline."""
    (nodes,) = nodes_of((group,), cluster)
    per_node = len(nodes) // len(set(nodes))
    if per_node == len(nodes):
        return INSIDE
    return "stages across nodes" if per_node == 1 else f"{per_node} stages a node"


def all_rows(*, quick: bool = False) -> Iterator[dict[str, Any]]:
    """All clusters and batches."""
    profile = load(Profile, CONF / "profiles" / "sd21_a100_bf16.json")
    for nodes in (2, 8):
        for batch_size in (8,) if quick else (8, 32):
            show(f"{nodes} nodes, {batch_size} samples a device")
            yield from rows_of(profile, cluster_of(8 * nodes), batch_size)


def main() -> int:
    """Compare the placements and report."""
    options = parser(__doc__).parse_args()
    report = Report("mapping", rows=list(all_rows(quick=options.quick)))
    over_best = []
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report.rows:
        case = cases.setdefault(f"{row['devices']}_b{row['batch']}", {})
        case[row["placement"]] = row
    for case, by_name in cases.items():
        mapped, inside = by_name["mapped"], by_name[INSIDE]
        pipelines = [row for name, row in by_name.items() if name not in ("ddp", "mapped")]
        over_best.append(mapped["iteration_ms"] / min(row["iteration_ms"] for row in pipelines))
        report.figures |= {
            f"ddp_card_mb_{case}": by_name["ddp"]["card_MB"],
            f"inside_card_mb_{case}": inside["card_MB"],
            f"least_card_mb_{case}": min(row["card_MB"] for row in pipelines),
            f"mapped_card_mb_{case}": mapped["card_MB"],
            f"inside_over_mapped_{case}": inside["iteration_ms"] / mapped["iteration_ms"],
            f"gap_{case}": mapped["gap"],
        }
    report.figures["mapped_over_best_layout_max"] = max(over_best)
    report.bar("mapped_over_best_layout_max", "<=", 1.0)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

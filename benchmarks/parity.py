"""The same numbers: pipelines over real gloo processes against one process.

    python -m benchmarks.parity [--quick] [--json]

Ten AdamW steps with active clipping of a diffusers U-Net (skips, frozen BERT) and a DiT. One
process accumulates the same micro-batches, with encoders on the slices that the plan prescribes.
Per tensor, the relative difference is ||a - b|| / ||b||; a tensor whose norm is below 1e-6 of the
whole gradient's is rounding noise of something that is exactly zero (a key's bias) and is measured
against that floor. With one replica everything must be equal in every bit.
"""

import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Report, parser, show
from benchmarks.models import dit_spec, fields, unet_spec
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.profiling.clock import Repeats
from lightning_dpipe.profiling.store import default_samples, profile_model
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.reduce import open_reducer
from lightning_dpipe.strategy.assemble import PipelineSession
from lightning_dpipe.strategy.clipping import clip_by_norm
from lightning_dpipe.strategy.collectives import HostLink
from tests.oracle import accumulate, encode, fills_of, joint, whole
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS, ROWS, CLIP = 10, 4, 0.05
NOISE = 1e-6


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    stages: int
    schedule: str
    filled: bool = True
    replicas: int = 1
    selfcond: bool = False
    accumulate: int = 1

    @property
    def world(self) -> int:
        return self.stages * self.replicas

    @property
    def num_microbatches(self) -> int:
        return 2 * self.stages

    def spec(self) -> PipelineSpec:
        make = unet_spec if self.model == "unet" else dit_spec
        return make(selfcond=self.selfcond)

    def coin(self, step: int) -> bool:
        return self.selfcond and step % 3 != 1

    def batch(self, spec: PipelineSpec, step: int, rank: int) -> dict[str, Tensor]:
        return fields(spec, ROWS, step=step, rank=rank, world=self.world)


CASES = (
    *(
        Case(model, stages, schedule, filled)
        for model in ("unet", "dit")
        for stages, schedule, filled in (
            (2, "1f1b", True), (2, "gpipe", False), (4, "1f1b", False), (4, "gpipe", True),
        )
    ),
    Case("unet", 2, "1f1b", selfcond=True),
    Case("dit", 4, "1f1b", selfcond=True),
    Case("unet", 2, "1f1b", accumulate=2),
    Case("unet", 2, "1f1b", replicas=2),
    Case("dit", 2, "gpipe", filled=False, replicas=2, accumulate=2),
)  # fmt: skip
QUICK = (CASES[0], CASES[8], CASES[10], CASES[11])

Numbers = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses by step, first step's gradients and final weights by name."""


def weights_of(spec: PipelineSpec) -> dict[str, torch.nn.Parameter]:
    """Trained weights by layer and position, in model order."""
    return {
        f"{layer.name}.{i}": p
        for layer in spec.backbones[0].layers
        for i, p in enumerate(layer.parameters())
        if p.requires_grad
    }


def pipeline(rank: int, case: Case) -> tuple[Any, Numbers]:
    """One rank's run; its losses are this rank's share of the mean."""
    spec = case.spec()
    graph = trace(spec)
    binding = bind(spec, graph)
    plan = agreed_plan(case, spec)
    session = PipelineSession(
        graph=graph, binding=binding, plan=plan, rank=rank, transport=DistTransport(CPU),
        device=CPU, seed=0, reducer=open_reducer(plan.replica_sets, rank, CPU),
    )  # fmt: skip
    weights = weights_of(spec)
    own = {id(p) for s in session.stages.values() for p in s.parameters}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    losses, first = [], {}
    sizes = (ROWS,) * plan.num_devices
    total = ROWS * case.world * case.accumulate
    for micro in range(STEPS * case.accumulate):
        last = (micro + 1) % case.accumulate == 0
        ahead = case.filled and micro + 1 < STEPS * case.accumulate
        result = session.step(
            case.batch(spec, micro, rank), sizes=sizes, batch_index=micro, loss_scale=1.0 / total,
            next_batch=case.batch(spec, micro + 1, rank) if ahead else None,
            next_sizes=sizes if ahead else None, self_conditioned=case.coin(micro), reduce=last,
        )  # fmt: skip
        losses.append(sum(float(x) for x in result.loss_sum.values()) / (ROWS * case.world))
        if last:
            session.wait_reduction()
            first = first or {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}
            clip_by_norm(list(weights.values()), CLIP, HostLink(), CPU)
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    final = {n: p.detach() for n, p in weights.items() if id(p) in own}
    return to_data(plan), (losses, first, final)


def agreed_plan(case: Case, spec: PipelineSpec) -> Plan:
    """Rank 0 measures and plans, all ranks get the plan."""
    graph = trace(spec)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        samples = default_samples(
            graph, batch_size=ROWS, num_devices=case.stages, num_microbatches=case.num_microbatches
        )
        with tempfile.TemporaryDirectory() as folder:
            profile = profile_model(
                spec, graph, samples=samples, device=CPU, dtype="float32", cache_dir=Path(folder),
                repeats=Repeats(warmup=1, repeats=1),
            )  # fmt: skip
        plan = make_plan(
            profile, world_size=case.world, batch_size=ROWS, num_stages=case.stages,
            num_microbatches=case.num_microbatches, schedule=case.schedule, fill=case.filled,
        )  # fmt: skip
        box = [to_data(plan)]
    dist.broadcast_object_list(box)
    found: Plan = from_data(Plan, box[0])
    return found


def one_process(case: Case, plan: Plan) -> Numbers:
    """The oracle: plain gradient accumulation over the same micro-batches."""
    spec = case.spec()
    weights = weights_of(spec)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    losses, first = [], {}
    total = ROWS * case.world * case.accumulate
    bind(spec, trace(spec))  # frozen components to eval mode
    for micro in range(STEPS * case.accumulate):
        loss = 0.0
        for ranks in plan.groups:
            encoded = {
                rank: encode(
                    spec, case.batch(spec, micro, rank), slices(case, plan, d, spec, micro)
                )
                for d, rank in enumerate(ranks)
            }
            named = joint([encoded[rank] for rank in sorted(ranks)])
            loss += accumulate(
                spec, named, plan.num_microbatches, 1.0 / total, self_conditioned=case.coin(micro)
            )
        losses.append(loss / (ROWS * case.world))
        if (micro + 1) % case.accumulate == 0:
            first = first or {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}
            torch.nn.utils.clip_grad_norm_(list(weights.values()), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return losses, first, {n: p.detach() for n, p in weights.items()}


def slices(case: Case, plan: Plan, device: int, spec: PipelineSpec, micro: int) -> Sequence[Any]:
    """Encoder slices of a batch: those of the step before, which encoded it, or up front."""
    if not case.filled or micro == 0:
        return whole(spec.frozen, ROWS)
    return fills_of(plan, device, spec, self_conditioned=case.coin(micro - 1))


def compare(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, float]:
    """Largest absolute and relative difference over all tensors.

    Raises:
        ValueError: A tensor is missing on one side.
    """
    if found.keys() != wanted.keys():
        raise ValueError(f"tensors differ: {sorted(set(found) ^ set(wanted))[:5]}")
    floor = NOISE * math.sqrt(sum(float(t.double().norm()) ** 2 for t in wanted.values()))
    worst_abs = worst_rel = 0.0
    for name, b in wanted.items():
        gap = (found[name] - b).double()
        worst_abs = max(worst_abs, float(gap.abs().max()))
        worst_rel = max(worst_rel, float(gap.norm()) / max(float(b.double().norm()), floor))
    return worst_abs, worst_rel


def run(case: Case) -> dict[str, Any]:
    """One row."""
    start = time.monotonic()
    outcomes = run_ranks(pipeline, case.world, case, timeout_s=600)
    plan = from_data(Plan, outcomes[0][0])
    losses, grads, weights = one_process(case, plan)
    numbers = [numbers for _, numbers in outcomes]
    found_losses = [sum(column) for column in zip(*(n[0] for n in numbers), strict=True)]
    found_grads = {k: v for n in numbers for k, v in n[1].items()}
    found_weights = {k: v for n in numbers for k, v in n[2].items()}
    grad_abs, grad_rel = compare(found_grads, grads)
    weight_abs, weight_rel = compare(found_weights, weights)
    gaps = [abs(a - b) / abs(b) for a, b in zip(found_losses, losses, strict=True)]
    return {
        "model": case.model, "stages": case.stages, "replicas": case.replicas,
        "schedule": case.schedule, "filled": case.filled, "selfcond": case.selfcond,
        "accumulate": case.accumulate, "fills": len(plan.fills), "tensors": len(grads),
        "loss_rel": max(gaps[:1] if case.replicas > 1 else gaps),
        "grad_abs": grad_abs, "grad_rel": grad_rel,
        "weight_abs": weight_abs, "weight_rel": weight_rel, "s": time.monotonic() - start,
    }  # fmt: skip


def main() -> int:
    """Run every case."""
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("parity")
    for case in QUICK if options.quick else CASES:
        show(f"{case}")
        report.rows.append(run(case))
    single = [row for row in report.rows if row["replicas"] == 1]
    report.figures = {
        "grad_max_abs_one_replica": max(row["grad_abs"] for row in single),
        "weights_max_abs_one_replica": max(row["weight_abs"] for row in single),
        "grad_max_rel": max(row["grad_rel"] for row in report.rows),
        "loss_max_rel": max(row["loss_rel"] for row in report.rows),
        "cases": len(report.rows),
    }
    report.bar("grad_max_abs_one_replica", "==", 0)
    report.bar("weights_max_abs_one_replica", "==", 0)
    report.bar("grad_max_rel", "<=", 1e-6)
    report.bar("loss_max_rel", "<=", 1e-6)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

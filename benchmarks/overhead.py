"""What the engine costs: against a bare loop, and against torch's own 1F1B on the same cut.

    python -m benchmarks.overhead [--quick] [--json]

(a) One process, S=1, M=8: the engine against a loop over the same layers and micro-batches.
(b) Two gloo processes, one thread each, an unfilled DiT without skips, M=8: the engine against
    `torch.distributed.pipelining.Schedule1F1B` on the same layers and the same cut.
Both sides run alternately in one process set; the figure is the median of the paired ratios.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.common import Report, parser, show
from benchmarks.models import dit_spec, fields
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Layer, PipelineSpec
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.strategy.assemble import PipelineSession
from tests.ranks import run_ranks

MICROBATCHES = 8
ROWS = 32
CPU = torch.device("cpu")


def spec() -> PipelineSpec:
    """8 blocks of width 256 on 64 tokens, nothing frozen: both sides do the same work."""
    return dit_spec(depth=8, width=256, side=16, noised=False)


def halves(graph: ModelGraph, num_stages: int, batch_size: int) -> Plan:
    """Cut in the middle by number of layers."""
    backbone = graph.backbones[0]
    borders = [i * len(backbone.layers) // num_stages for i in range(num_stages + 1)]
    return Plan(
        graph_digest=digest(graph),
        profile_digest="none",
        groups=default_groups(num_stages, num_stages),
        stages=tuple(
            Stage(backbone=backbone.name, start=borders[i], stop=borders[i + 1], devices=(i,))
            for i in range(num_stages)
        ),
        num_microbatches=MICROBATCHES,
        batch_size=batch_size,
        schedule="1f1b",
    )


def paired(ours: Callable[[], None], theirs: Callable[[], None], pairs: int) -> list[float]:
    """Ratio of times (ours / theirs), alternating which goes first."""
    for run in (ours, theirs, ours, theirs):
        run()
    ratios = []
    for i in range(pairs):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        a, b = clocked(first), clocked(second)
        ratios.append(a / b if first is ours else b / a)
    return ratios


def clocked(run: Callable[[], None]) -> float:
    """Seconds of one call, from a common start on all ranks to the slowest rank's end."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    run()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def against_loop(pairs: int) -> list[float]:
    """Part (a)."""
    torch.set_num_threads(1)
    model = spec()
    graph = trace(model)
    binding = bind(model, graph)
    session = PipelineSession(
        graph=graph, binding=binding, plan=halves(graph, 1, ROWS), rank=0,
        transport=ThreadHub(1).transport(0), device=CPU, seed=0,
    )  # fmt: skip
    batch = fields(model, ROWS, step=0, rank=0, world=1)
    weights = [p for layer in model.backbones[0].layers for p in layer.parameters()]
    scale = 1.0 / ROWS

    def clear() -> None:
        for p in weights:
            p.grad = None

    def engine() -> None:
        clear()
        session.step(batch, sizes=(ROWS,), batch_index=0, loss_scale=scale)

    def loop() -> None:
        clear()
        parts = {name: tensor.tensor_split(MICROBATCHES) for name, tensor in batch.items()}
        for m in range(MICROBATCHES):
            env = {name: pieces[m] for name, pieces in parts.items()}
            run_layers(model.backbones[0].layers, env)
            loss = model.losses()["dit"]
            (loss.fn(*[env[r] for r in loss.reads]).sum() * scale).backward()

    return paired(engine, loop, pairs)


def run_layers(layers: tuple[Layer, ...], env: dict[str, Tensor]) -> None:
    """The bare loop: no graph, no program."""
    for layer in layers:
        out = layer.module(*[env[r] for r in layer.reads])
        env.update(zip(layer.writes, out if isinstance(out, tuple) else (out,), strict=True))


class TorchStage(nn.Module):
    """The same layers as a module for torch's PipelineStage; labels and times come as kwargs."""

    def __init__(
        self, layers: tuple[Layer, ...], carried: tuple[str, ...], leaving: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.layers, self.carried, self.leaving = layers, carried, leaving
        self.weights = nn.ParameterList(p for layer in layers for p in layer.parameters())

    def forward(self, *carried: Tensor, **side: Tensor) -> Tensor | tuple[Tensor, ...]:
        env = dict(zip(self.carried, carried, strict=True)) | side
        run_layers(self.layers, env)
        out = tuple(env[name] for name in self.leaving)
        return out if len(out) > 1 else out[0]


def against_torch(rank: int, pairs: int) -> list[float]:
    """Part (b), on one rank of two."""
    model = spec()
    graph = trace(model)
    rows = ROWS // 2
    plan = halves(graph, 2, rows)
    transport = DistTransport(CPU)
    session = PipelineSession(
        graph=graph, binding=bind(model, graph), plan=plan, rank=rank, transport=transport,
        device=CPU, seed=0,
    )  # fmt: skip
    locals_ = [fields(model, rows, step=0, rank=r, world=2) for r in range(2)]
    ours_weights = [p for s in session.stages.values() for p in s.parameters]

    def engine() -> None:
        for p in ours_weights:
            p.grad = None
        session.step(locals_[rank], sizes=(rows, rows), batch_index=0, loss_scale=1.0 / ROWS)

    theirs = torch_pipeline(copy.deepcopy(model), plan.stages[0].stop, rank, locals_)
    ratios = paired(engine, theirs, pairs)
    session.close()
    return ratios


def torch_pipeline(
    model: PipelineSpec, cut: int, rank: int, locals_: list[dict[str, Tensor]]
) -> Callable[[], None]:
    """One step of torch's 1F1B over the joint batch, which each rank is given whole."""
    index = rank  # torch numbers stages by rank
    layers = model.backbones[0].layers
    mine = layers[:cut] if index == 0 else layers[cut:]
    written = {w for layer in layers[:cut] for w in layer.writes}
    crossing = tuple(sorted(written & {r for layer in layers[cut:] for r in layer.reads}))
    side = {r for layer in mine for r in layer.reads} - {w for layer in mine for w in layer.writes}
    carried = ("noisy",) if index == 0 else crossing
    module = TorchStage(mine, carried, crossing if index == 0 else ("out",))
    stage = PipelineStage(module, index, 2, CPU)
    loss_node = model.losses()["dit"]

    def loss_fn(out: Tensor, packed: Tensor) -> Tensor:
        target, weight = packed[..., :-1].reshape(out.shape), packed[..., -1]
        return loss_node.fn(out, target, weight).sum() / ROWS

    runner = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    order = [(r, i) for i in range(ROWS // 2) for r in range(2)]
    joint = {k: torch.stack([locals_[r][k][i] for r, i in order]) for k in locals_[0]}
    packed = torch.cat([joint["target"].flatten(1), joint["weight"][:, None]], dim=1)

    def step() -> None:
        for p in module.parameters():
            p.grad = None
        kwargs = {k: joint[k] for k in side - set(carried)}
        if index == 0:
            runner.step(joint["noisy"], **kwargs)
        else:
            runner.step(target=packed, losses=[], **kwargs)

    return step


def main() -> int:
    """Measure both parts."""
    options = parser(__doc__).parse_args()
    pairs = 10 if options.quick else 40
    report = Report("overhead")
    show("engine against a bare loop, one process ...")
    loop = against_loop(pairs)
    show("engine against torch's Schedule1F1B, two processes ...")
    peer = run_ranks(against_torch, 2, pairs, timeout_s=900)[0]
    for name, ratios in (("s1_over_loop", loop), ("over_torch_1f1b", peer)):
        report.figures[name] = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4)
        row: dict[str, Any] = {"case": name, "pairs": len(ratios)}
        report.rows.append(row | {"median": report.figures[name], "q25": low, "q75": high})
    report.bar("s1_over_loop", "<=", 1.03)
    report.bar("over_torch_1f1b", "<=", 1.02)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

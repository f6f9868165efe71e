"""A ControlNet, whose locked encoder no cache can keep: filled bubbles against DDP with a cache.

    python -m benchmarks.controlnet [--quick] [--json]

Two real ranks of one thread over gloo, the classes and flags of recipe `controlnet_tiny` at a size
of 0.5 to 1 s an iteration, with a VAE that makes frozen work about as heavy beside the trained as
it is in the full model. The locked encoder reads the noisy latent, which is new in every step; what
can be kept from epoch to epoch is the VAE's moments and the encoded caption. Four ways of running
the same optimizer step on the same samples take turns, each round in another order:

    unfilled      2 stages, everything frozen up front
    filled        2 stages, everything frozen in bubbles
    filled, kept  2 stages, moments and captions from a cache, the rest in bubbles
    ddp, kept     data parallelism, moments and captions from a cache, the locked encoder every step

Figures are medians over the rounds of ratios within a round. All four must report the same loss.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import DDPMScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import Report, parser, show
from benchmarks.fill import CPU, STAGES, Runner, shared
from benchmarks.models import fields
from lightning_dpipe.core.caching import CacheCut
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import Field, PipelineSpec
from lightning_dpipe.planning.pairs import cached_fills, cached_profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.profiling.calibrate import calibrate
from lightning_dpipe.profiling.links import measure_links
from lightning_dpipe.profiling.store import default_samples, profile_model
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.transport import torch_dtype
from lightning_dpipe.simulation.simulate import simulate
from lightning_dpipe.strategy.assemble import PipelineSession
from lightning_dpipe.strategy.cache.open import cut_of
from lightning_dpipe.strategy.local import sample_losses
from lightning_dpipe.strategy.modules.controlnet import ControlNet
from tests.ranks import run_ranks

ROWS, MICROBATCHES = 8, 4
CALIBRATION = 10
UNFILLED, FILLED, KEPT, DDP = "unfilled", "filled", "filled, kept", "ddp, kept"


def controlnet_spec(size: int, channels: int, text_layers: int) -> PipelineSpec:
    """Recipe `controlnet_tiny` with wider layers; `size` is the images' side in pixels."""
    torch.manual_seed(0)
    wide, encoder = 2 * channels, 3 * channels // 4
    module = ControlNet(
        image_size=size,
        num_tokens=16,
        unet={
            "sample_size": size // 8, "block_out_channels": [channels, wide],
            "layers_per_block": 2, "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "cross_attention_dim": wide,
            "attention_head_dim": [2, 4], "norm_num_groups": 8,
        },
        vae={
            "block_out_channels": [encoder, 2 * encoder, 2 * encoder, 2 * encoder],
            "layers_per_block": 1, "norm_num_groups": 8,
            "sample_size": size, "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
        },
        text={
            "vocab_size": 64, "hidden_size": wide, "intermediate_size": 2 * wide,
            "num_hidden_layers": text_layers, "num_attention_heads": 4,
            "max_position_embeddings": 16, "hidden_act": "quick_gelu", "projection_dim": 16,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        scheduler=DDPMScheduler(),
        caption_dropout=0.0,
        seed=0,
    )  # fmt: skip
    module.configure_model()
    # A fresh copy's outputs pass through zero weights: nothing before them would get a gradient.
    for p in module.controlnet.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.02)
    return module.pipeline_spec()


def with_kept(spec: PipelineSpec, graph: ModelGraph, cut: CacheCut) -> PipelineSpec:
    """The model of who has a cache: kept values are batch fields, their layers are gone."""
    kept = {
        graph.values[v].name: Field(
            shape=graph.values[v].shape, dtype=torch_dtype(graph.values[v].dtype)
        )
        for v in cut.kept
    }
    left = tuple(
        replace(c, layers=tuple(x for i, x in enumerate(c.layers) if (c.name, i) not in cut.idle))
        for c in spec.frozen
    )
    return replace(spec, inputs={**spec.inputs, **kept}, frozen=tuple(c for c in left if c.layers))


class Known:
    """A cache that has everything and keeps nothing more."""

    watched: frozenset[int] = frozenset()

    def __init__(self, cut: CacheCut) -> None:
        self.cut = cut

    def see(self, *_: Any) -> None: ...

    def step_ended(self) -> None: ...


class Whole(nn.Module):
    """The mean loss of a local batch, for DistributedDataParallel."""

    def __init__(self, spec: PipelineSpec) -> None:
        super().__init__()
        self.spec = spec
        layers = spec.backbones[0].layers
        found = {id(p): p for x in layers for p in x.parameters() if p.requires_grad}
        self.weights = nn.ParameterList(found.values())

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        losses = sample_losses(self.spec, batch, self_conditioned=False)
        return next(iter(losses.values())).mean()


class Parallel:
    """Iterations of DDP, timed as those of a pipeline are."""

    def __init__(self, spec: PipelineSpec, batch: Mapping[str, Tensor]) -> None:
        self.whole = DistributedDataParallel(Whole(spec))
        self.batch = batch
        self.optimizer = torch.optim.AdamW(self.whole.parameters(), lr=1e-5)
        self.loss = 0.0

    def iteration(self) -> float:
        """Seconds from a common start to the end of the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.whole(self.batch)
        loss.backward()
        self.optimizer.step()
        self.loss = float(loss.detach()) * ROWS
        dist.barrier()
        return time.perf_counter() - start


@dataclass
class Outcome:
    """What rank 0 reports; losses are of the first iteration, over both ranks' samples."""

    times_s: dict[str, list[float]]
    losses: dict[str, float]
    predicted_s: dict[str, float]
    bubbles: dict[str, float]
    shares: dict[str, float]


def encoded(spec: PipelineSpec, binding: Binding, cut: CacheCut, batch: Mapping[str, Tensor]):
    """What a cache has of a batch: by group and value, each encoded as a whole batch."""
    values = {v: batch[name] for name, v in binding.inputs.items()}
    with torch.no_grad():
        for component in spec.frozen:
            for layer in binding.layers[component.name]:
                values |= {v: t.contiguous() for v, t in layer.run(values).items()}
    return {n: {v: values[v] for v in group.kept} for n, group in enumerate(cut.groups)}


def measure(rank: int, size: int, channels: int, text_layers: int, rounds: int) -> Outcome:
    """One rank of two."""
    spec = controlnet_spec(size, channels, text_layers)
    graph = trace(spec)
    binding = bind(spec, graph)
    cut = cut_of(graph, binding)
    transport = DistTransport(CPU)
    batch = fields(spec, ROWS, step=0, rank=rank, world=STAGES)
    kept = encoded(spec, binding, cut, batch)
    trained = [p for x in spec.backbones[0].layers for p in x.parameters() if p.requires_grad]
    start = [(p, p.detach().clone()) for p in trained]

    def runner(plan: Plan, at_hand: Any = None) -> Runner:
        session = PipelineSession(
            graph=graph, binding=binding, plan=plan, rank=rank, transport=transport, device=CPU,
            seed=0,
        )  # fmt: skip
        if at_hand is not None:
            session.keep(Known(cut))
        return Runner(session, batch, filled=bool(plan.fills), kept=at_hand)

    profile = _profile(spec, graph, binding, transport)
    common = {"world_size": STAGES, "batch_size": ROWS, "num_microbatches": MICROBATCHES}
    first = make_plan(profile, **common)
    warm = runner(first)
    for _ in range(2):
        warm.iteration()
    profile = shared(calibrate(profile, first, [warm.traced() for _ in range(CALIBRATION)]))
    plan = make_plan(profile, **common)
    plans = {
        UNFILLED: replace(plan, fills=()),
        FILLED: plan,
        KEPT: replace(plan, fills=cached_fills(plan, profile, profile, cut)),
    }
    runners = {name: runner(p, kept if name == KEPT else None) for name, p in plans.items()}
    ways: dict[str, Any] = dict(runners)
    ways[DDP] = Parallel(with_kept(spec, graph, cut), batch | _named(graph, kept))
    losses: dict[str, float] = {}
    for name, way in ways.items():
        with torch.no_grad():  # of all ways the first loss is that of the same weights
            for p, value in start:
                p.copy_(value)
        way.iteration()
        total = torch.tensor(way.loss)
        dist.all_reduce(total)
        losses[name] = float(total) / (ROWS * STAGES)
        way.iteration()
    times = _take_turns(ways, rounds, rank)
    profiles = {UNFILLED: profile, FILLED: profile, KEPT: cached_profile(profile, cut)}
    return Outcome(
        times_s=times,
        losses=losses,
        predicted_s={
            name: simulate(p, schedule_of(p), profiles[name]).end_us / 1e6
            for name, p in plans.items()
        },
        bubbles={name: r.traced().bubble_ratio for name, r in runners.items()},
        shares=_shares(profile, cut),
    )


def _named(graph: ModelGraph, kept: Mapping[int, Mapping[int, Tensor]]) -> dict[str, Tensor]:
    return {graph.values[v].name: t for group in kept.values() for v, t in group.items()}


def _profile(
    spec: PipelineSpec, graph: ModelGraph, binding: Binding, transport: DistTransport
) -> Profile:
    """Measured on both ranks side by side; rank 0's on both."""
    samples = default_samples(
        graph, batch_size=ROWS, num_devices=STAGES, num_microbatches=MICROBATCHES
    )
    links = measure_links(transport, CPU)
    with tempfile.TemporaryDirectory() as folder:
        profile = profile_model(
            spec, graph, binding, samples=samples, device=CPU, dtype="float32", links=links,
            cache_dir=Path(folder),
        )  # fmt: skip
    return shared(profile)


def _take_turns(ways: Mapping[str, Any], rounds: int, rank: int) -> dict[str, list[float]]:
    """Each way once a round, starting with another one each time."""
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            times[name].append(ways[name].iteration())
        if rank == 0 and turn % 10 == 9:
            show(f"  {turn + 1}/{rounds} rounds")
    return times


def _shares(profile: Profile, cut: CacheCut) -> dict[str, float]:
    """Frozen over trainable time of a local batch; of the frozen, what a cache leaves."""
    backbone = profile.graph.backbones[0]
    span = (backbone.name, 0, len(backbone.layers))
    trained = profile.forward_us(*span, ROWS) + profile.backward_us(*span, ROWS)

    def frozen(which: Profile) -> int:
        return sum(which.forward_us(c.name, 0, len(c.layers), ROWS) for c in profile.graph.frozen)

    left = frozen(cached_profile(profile, cut))
    return {"rho": frozen(profile) / trained, "uncacheable_share": left / frozen(profile)}


def add(report: Report, outcome: Outcome) -> None:
    """The table and the ratios."""
    times = outcome.times_s
    for name, took in times.items():
        quartiles = statistics.quantiles(took, n=4)
        report.rows.append(
            {"way": name, "measured_ms": 1e3 * statistics.median(took),
             "quartiles_ms": f"{1e3 * quartiles[0]:.4g}..{1e3 * quartiles[2]:.4g}",
             "predicted_ms": 1e3 * outcome.predicted_s.get(name, float("nan")),
             "bubble": outcome.bubbles.get(name, float("nan")), "loss": outcome.losses[name],
             "rounds": len(took)}
        )  # fmt: skip

    def ratio(slow: str, fast: str) -> float:
        return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))

    report.figures |= outcome.shares
    report.figures["speedup_over_unfilled"] = ratio(UNFILLED, FILLED)
    report.figures["speedup_over_ddp_kept"] = ratio(DDP, FILLED)
    report.figures["kept_speedup_over_ddp_kept"] = ratio(DDP, KEPT)
    report.figures["prediction_error"] = max(
        abs(said / statistics.median(times[name]) - 1) for name, said in outcome.predicted_s.items()
    )
    reference = outcome.losses[UNFILLED]
    report.figures["loss_max_rel"] = max(
        abs(loss - reference) / reference for loss in outcome.losses.values()
    )
    report.bar("loss_max_rel", "<=", 1e-5)


def main() -> int:
    """Measure all four ways in one run."""
    options = parser(__doc__).parse_args()
    size, channels, text_layers, rounds = (64, 32, 2, 6) if options.quick else (64, 64, 4, 40)
    report = Report("controlnet")
    show(f"images of {size} pixels: profiling, calibrating, {rounds} rounds of 4 ways ...")
    found = run_ranks(measure, STAGES, size, channels, text_layers, rounds, timeout_s=3000)
    add(report, found[0])
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

"""What filling the bubbles is worth: two real ranks, a real U-Net, a real MiniLM text encoder.

    python -m benchmarks.fill [--quick] [--json] [--emulate D [--scale X] [--rounds N]]

S=2 stages, M in {2, 4} micro-batches, 32 samples per rank, one thread per rank, over gloo. An
unfilled and a filled iteration (optimizer included) alternate; the figures are medians. Costs are
calibrated on the first 20 iterations, ten of each kind, and the plan is made again from them. An op
takes longer while the other core is busy too, so each kind is predicted from its own ten; rho and
ideal are of the filled ones. rho = frozen / trainable time, beta = (S - 1) / M,
ideal = all work / S, bound = max(1 + rho, 1 + beta) / (1 + rho) x ideal.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import fill_emulated
from benchmarks.common import OUT, Report, parser, show
from benchmarks.models import emoji_spec, fields
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import from_data, to_data
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Activity, Timeline
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.profiling.calibrate import calibrate
from lightning_dpipe.profiling.links import measure_links
from lightning_dpipe.profiling.store import default_samples, profile_model
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.reduce import open_reducer
from lightning_dpipe.runtime.trace import Record, StepTrace, merge
from lightning_dpipe.simulation.render import save_png
from lightning_dpipe.simulation.simulate import simulate
from lightning_dpipe.strategy.assemble import Groups, PipelineSession
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ROWS, STAGES = 32, 2
TOKENS = 32  # MiniLM on 16 tokens, as the recipe has it, would be a rho of 0.26
CALIBRATION = 20


@dataclass
class Outcome:
    """What rank 0 reports of one M."""

    times_s: dict[str, list[float]]
    predicted_s: dict[str, float]
    timelines: dict[str, Timeline]
    profile: Profile
    plan: Plan


class Bench:
    """One rank: the model, its optimizer, and sessions over one transport."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.spec: PipelineSpec = emoji_spec(tokens=TOKENS)
        self.graph: ModelGraph = trace(self.spec)
        self.binding = bind(self.spec, self.graph)
        self.transport = DistTransport(CPU)
        self.batch = fields(self.spec, ROWS, step=0, rank=rank, world=STAGES)

    def profile(self, num_microbatches: int) -> Profile:
        """Measure, all ranks side by side; every rank gets rank 0's numbers."""
        samples = default_samples(
            self.graph, batch_size=ROWS, num_devices=STAGES, num_microbatches=num_microbatches
        )
        return self.profile_at(samples)

    def profile_at(self, samples: Mapping[str, Sequence[int]]) -> Profile:
        """As `profile`, at sizes given per component."""
        links = measure_links(self.transport, CPU)
        with tempfile.TemporaryDirectory() as folder:
            profile = profile_model(
                self.spec, self.graph, self.binding, samples=samples, device=CPU, dtype="float32",
                links=links, cache_dir=Path(folder),
            )  # fmt: skip
        return shared(profile)

    def session(self, plan: Plan) -> "Runner":
        """A session with its own optimizer over the plan's stage."""
        session = PipelineSession(
            graph=self.graph, binding=self.binding, plan=plan, rank=self.rank,
            transport=self.transport, device=CPU, seed=0,
            reducer=open_reducer(plan.replica_sets, self.rank, CPU),
        )  # fmt: skip
        return Runner(session, self.batch, filled=bool(plan.fills))


class Runner:
    """Runs whole iterations: schedule, frozen work, optimizer. `kept` is what a cache has."""

    def __init__(
        self,
        session: PipelineSession,
        batch: Mapping[str, Tensor],
        filled: bool,
        kept: Groups | None = None,
    ) -> None:
        self.session, self.batch, self.filled, self.kept = session, batch, filled, kept
        self.loss = 0.0
        weights = [p for s in session.stages.values() for p in s.parameters]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5)
        self.step = 0

    def iteration(self) -> float:
        """Seconds from a common start to the end of the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        self._run()
        dist.barrier()
        return time.perf_counter() - start

    def traced(self) -> Timeline:
        """Run one iteration and merge what the ranks recorded of it."""
        self.session.trace(True)
        dist.barrier()
        record = self._run()
        dist.barrier()
        assert record is not None
        record.end_ns = time.monotonic_ns()
        self.session.trace(False)
        every: list[StepTrace | None] = [None] * STAGES
        dist.all_gather_object(every, record)
        return merge([x for x in every if x is not None])

    def _run(self) -> StepTrace | None:
        plan = self.session.plan
        sizes = (plan.batch_size,) * plan.num_devices
        self.optimizer.zero_grad(set_to_none=True)
        result = self.session.step(
            self.batch,
            sizes=sizes,
            batch_index=self.step,
            loss_scale=1.0 / (plan.batch_size * plan.world_size),
            next_batch=self.batch if self.filled else None,
            next_sizes=sizes if self.filled else None,
            kept=self.kept,
            next_kept=self.kept if self.filled else None,
        )
        self.step += 1
        self.loss = sum((float(x) for x in result.loss_sum.values()), 0.0)
        self.session.wait_reduction()
        start_ns = time.monotonic_ns()
        self.optimizer.step()
        if result.trace is not None:
            done = Record(start_ns, time.monotonic_ns(), Activity.OPTIMIZER, "optimizer", None)
            result.trace.records.append(done)
        return result.trace


def shared(profile: Profile) -> Profile:
    """Rank 0's profile on every rank."""
    box = [to_data(profile)]
    dist.broadcast_object_list(box)
    found: Profile = from_data(Profile, box[0])
    return found


def measure(rank: int, num_microbatches: int, pairs: int) -> Outcome:
    """One M on one rank of two."""
    bench = Bench(rank)
    profile = bench.profile(num_microbatches)
    common = {
        "world_size": STAGES, "batch_size": ROWS, "num_microbatches": num_microbatches
    }  # fmt: skip
    first = make_plan(profile, **common)
    runners = [bench.session(replace(first, fills=())), bench.session(first)]
    for runner in runners:  # the first filled iteration encodes up front
        runner.iteration()
        runner.iteration()
    timelines = [runners[i % 2].traced() for i in range(CALIBRATION)]
    profiles = {
        name: shared(calibrate(profile, first, timelines[i::2]))
        for i, name in enumerate(("unfilled", "filled"))
    }
    plan = make_plan(profiles["filled"], **common)
    plans = {"unfilled": replace(plan, fills=()), "filled": plan}
    kinds = {name: bench.session(p) for name, p in plans.items()}
    for runner in kinds.values():
        runner.iteration()
        runner.iteration()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for pair in range(pairs):
        for name in sorted(kinds, reverse=bool(pair % 2)):
            times[name].append(kinds[name].iteration())
        if rank == 0 and pair % 10 == 9:
            show(f"  M={num_microbatches}: {pair + 1}/{pairs} pairs")
    shown = {name: runner.traced() for name, runner in kinds.items()}
    predicted = {name: simulate(p, schedule_of(p), profiles[name]) for name, p in plans.items()}
    return Outcome(
        times_s=times,
        predicted_s={name: t.end_us / 1e6 for name, t in predicted.items()},
        timelines=shown | {f"{name}, predicted": t for name, t in predicted.items()},
        profile=profiles["filled"],
        plan=plan,
    )


def work(profile: Profile, plan: Plan) -> tuple[float, float, float]:
    """Device seconds of an iteration: (frozen, trainable, optimizer), at the plan's sizes."""
    backbone = profile.graph.backbones[0]
    span = (backbone.name, 0, len(backbone.layers))
    rows = split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches)
    trained = sum(profile.forward_us(*span, n) + profile.backward_us(*span, n) for n in rows)
    frozen = plan.num_devices * sum(
        profile.forward_us(c.name, 0, len(c.layers), plan.batch_size) for c in profile.graph.frozen
    )
    return frozen / 1e6, trained / 1e6, profile.optimizer_us(*span) / 1e6


def add(report: Report, m: int, outcome: Outcome) -> None:
    """Figures of one M."""
    frozen, trained, update = work(outcome.profile, outcome.plan)
    rho, beta = frozen / trained, (STAGES - 1) / m
    ideal = (frozen + trained + update) / STAGES
    bound = max(1 + rho, 1 + beta) / (1 + rho) * ideal
    took = {name: statistics.median(times) for name, times in outcome.times_s.items()}
    said = outcome.predicted_s
    errors = {name: abs(said[name] - took[name]) / took[name] for name in took}
    gain = took["unfilled"] / took["filled"] - 1
    gain_said = said["unfilled"] / said["filled"] - 1
    cap = (1 + beta + rho) / max(1 + rho, 1 + beta)
    report.figures[f"filled_over_bound_m{m}"] = took["filled"] / bound
    report.figures[f"predicted_cap_share_m{m}"] = (1 + gain_said) / cap
    report.figures[f"gain_share_m{m}"] = gain / gain_said
    report.figures[f"speedup_m{m}"] = 1 + gain
    report.figures["rho"] = max(rho, report.figures.get("rho", 0.0))
    worst = max(errors.values())
    report.figures["prediction_error"] = max(worst, report.figures.get("prediction_error", 0.0))
    for name in took:
        report.rows.append(
            {"M": m, "iteration": name, "measured_ms": 1e3 * took[name],
             "predicted_ms": 1e3 * said[name], "error": errors[name], "ideal_ms": 1e3 * ideal,
             "bound_ms": 1e3 * bound, "bubble": outcome.timelines[name].bubble_ratio,
             "rho": rho, "pairs": len(outcome.times_s[name])}
        )  # fmt: skip
    names = ("unfilled", "filled", "filled, predicted")
    save_png(
        [outcome.timelines[name] for name in names],
        OUT / f"fill_m{m}.png",
        title="\n".join((f"{STAGES} stages, {m} micro-batches", *names)),
    )


def main() -> int:
    """Measure M = 2 and 4."""
    arguments = parser(__doc__)
    arguments.add_argument("--emulate", type=int, metavar="D", help="D emulated devices instead")
    arguments.add_argument("--scale", type=float, help="with --emulate: stretches all times")
    arguments.add_argument("--rounds", type=int, help="with --emulate: iterations of each case")
    options = arguments.parse_args()
    report = Report("fill")
    if options.emulate:
        fill_emulated.run(
            report,
            options.emulate,
            rounds=options.rounds or (2 if options.quick else 7),
            scale=options.scale or (1.0 if options.quick else 2.0),
        )
        return report.finish(as_json=options.json)
    pairs = 10 if options.quick else 60
    for m in (2, 4):
        show(f"M={m}: profiling, calibrating, {pairs} pairs ...")
        add(report, m, run_ranks(measure, STAGES, m, pairs, timeout_s=1800)[0])
    report.bar("rho", ">=", 0.3)
    report.bars["rho_high"] = {"value": report.figures["rho"], "op": "<=", "limit": 0.6,
                               "holds": report.figures["rho"] <= 0.6}  # fmt: skip
    for m in (2, 4):
        report.bar(f"filled_over_bound_m{m}", "<=", 1.08)
        report.bar(f"predicted_cap_share_m{m}", ">=", 0.95)
        report.bar(f"gain_share_m{m}", ">=", 0.85)
    report.bar("prediction_error", "<=", 0.10)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

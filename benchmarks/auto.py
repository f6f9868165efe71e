"""Does "auto" pick the best stages and micro-batches? Two real ranks, all choices tried beside it.

    python -m benchmarks.auto [--quick] [--json]

The model, batch and ranks of `benchmarks.fill`: a real U-Net and MiniLM, gloo, one thread a rank.
(a) One profile, measured side by side, makes the plans for S in {1, 2} x M in {1, 2, 4, 8, 16},
    filled, and the plan that the search picks as the strategy lets it. All run in turn, optimizer
    and gradient sums included. The best of all is found on the even rounds and compared on the odd
    ones, round by round, so that its luck does not count.
(b) Hold-out: a profile of S=2, M=4 predicts S=2, M=8 and S=1, M=2, whose micro-batches have as many
    rows. It is calibrated on iterations of S=2, M=4 that run in the same turns, so that a host that
    changes its speed changes it for all.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common import Report, parser, show
from benchmarks.fill import ROWS, STAGES, Bench, shared
from lightning_dpipe.core.graph import ComponentKind, ModelGraph
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import MEASURED_MARGIN, make_plan
from lightning_dpipe.profiling.calibrate import calibrate
from lightning_dpipe.simulation.simulate import simulate
from tests.ranks import run_ranks

MICROBATCHES = (1, 2, 4, 8, 16)
QUICK_MICROBATCHES = (2, 4, 8)
AUTO = "auto"
HOLDOUT = {"holdout_error_m8": (2, 8), "holdout_error_s1": (1, 2)}
"""Figure -> (S, M) that the profile of S=2, M=4 has to predict."""


@dataclass
class Outcome:
    """What rank 0 reports: per plan the measured iterations, and what was predicted."""

    times_s: dict[str, list[float]]
    predicted_s: dict[str, float]
    plans: dict[str, Plan]


def sizes(graph: ModelGraph) -> dict[str, tuple[int, ...]]:
    """Local batch sizes that tell about every S and M: powers of two up to the joint batch."""
    joint = ROWS * STAGES
    backbone = tuple(joint >> i for i in reversed(range(joint.bit_length())) if joint >> i > 1)
    frozen = tuple(n for n in backbone if 4 <= n <= ROWS)
    return {
        c.name: frozen if c.kind is ComponentKind.FROZEN else backbone for c in graph.components
    }


def name_of(num_stages: int, num_microbatches: int) -> str:
    """Of a plan that was tried."""
    return f"S={num_stages} M={num_microbatches}"


def shape_of(plan: Plan) -> str:
    """Stages, devices of a pipeline and micro-batches."""
    buckets = plan.num_devices == 1 and len(plan.stages) > 1
    return (
        f"S={1 if buckets else len(plan.stages)} M={plan.num_microbatches}"
        f"{f' {len(plan.stages)} buckets' if buckets else ''}"
    )


def measure(rank: int, microbatches: Sequence[int], rounds: int) -> Outcome:
    """One rank of two."""
    bench = Bench(rank)
    options = {"world_size": STAGES, "batch_size": ROWS}
    if rank == 0:
        show("profiling ...")
    profile, known = bench.profile_at(sizes(bench.graph)), bench.profile(4)
    plans = {
        name_of(s, m): make_plan(profile, **options, num_stages=s, num_microbatches=m)
        for s in (1, STAGES)
        for m in microbatches
    }
    plans[AUTO] = make_plan(
        profile, **options, num_stages="auto", num_microbatches="auto", margin=MEASURED_MARGIN
    )
    for figure, (s, m) in HOLDOUT.items():
        plans[figure] = make_plan(known, **options, num_stages=s, num_microbatches=m)
    profiled = make_plan(known, **options, num_stages=STAGES, num_microbatches=4)
    if rank == 0:
        show(f"auto picks {shape_of(plans[AUTO])}; {len(plans) + 1} plans, {rounds} rounds ...")
    times, timelines = alternate(bench, plans, profiled, rounds)
    known = shared(calibrate(known, profiled, timelines))
    predicted = {}
    for name, plan in plans.items():
        said = simulate(plan, schedule_of(plan), known if name in HOLDOUT else profile)
        predicted[name] = said.end_us / 1e6
    return Outcome(times, predicted, plans)


def alternate(
    bench: Bench, plans: Mapping[str, Plan], profiled: Plan, rounds: int
) -> tuple[dict[str, list[float]], list[Timeline]]:
    """Iterations of all plans in turn, each round beginning with another one.

    Returns:
        Seconds by plan, and the timelines of `profiled`, which is traced.
    """
    runners = {name: bench.session(plan) for name, plan in plans.items()}
    traced = bench.session(profiled)
    for runner in (*runners.values(), traced):
        runner.iteration()  # the first one encodes up front
        runner.iteration()
    times: dict[str, list[float]] = {name: [] for name in plans}
    timelines = []
    names = list(plans)
    for i in range(rounds):
        at = i * 5 % len(names)
        for name in names[at:] + names[:at]:
            times[name].append(runners[name].iteration())
        timelines.append(traced.traced())
        if bench.rank == 0 and i % 4 == 3:
            show(f"  {i + 1}/{rounds} rounds")
    return times, timelines


def over_best(times: Mapping[str, Sequence[float]], name: str) -> tuple[str, float]:
    """The best of the others on even rounds, and how much longer `name` takes on odd ones."""
    tried = [other for other in times if other != name and other not in HOLDOUT]
    best = min(tried, key=lambda other: statistics.median(times[other][::2]))
    ratios = [a / b for a, b in zip(times[name][1::2], times[best][1::2], strict=True)]
    return best, statistics.median(ratios)


def add(report: Report, outcome: Outcome) -> None:
    """Rows and figures."""
    took = {name: statistics.median(times) for name, times in outcome.times_s.items()}
    errors = {name: abs(outcome.predicted_s[name] - t) / t for name, t in took.items()}
    for name, plan in outcome.plans.items():
        times = outcome.times_s[name]
        report.rows.append(
            {"plan": name, "shape": shape_of(plan), "measured_ms": 1e3 * took[name],
             "fastest_ms": 1e3 * min(times), "predicted_ms": 1e3 * outcome.predicted_s[name],
             "error": errors[name], "fills": len(plan.fills), "rounds": len(times)}
        )  # fmt: skip
    best, ratio = over_best(outcome.times_s, AUTO)
    tried = [t for name, t in took.items() if name != AUTO and name not in HOLDOUT]
    show(f"auto: {shape_of(outcome.plans[AUTO])}, best: {best}")
    report.figures = {
        "auto_over_best": ratio,
        **{figure: errors[figure] for figure in HOLDOUT},
        "worst_over_best": max(tried) / min(tried),
        "auto_prediction_error": errors[AUTO],
    }
    report.bar("auto_over_best", "<=", 1.03)
    for figure in HOLDOUT:
        report.bar(figure, "<=", 0.05)


def main() -> int:
    """Try all plans."""
    options = parser(__doc__).parse_args()
    report = Report("auto")
    microbatches, rounds = (QUICK_MICROBATCHES, 4) if options.quick else (MICROBATCHES, 16)
    add(report, run_ranks(measure, STAGES, microbatches, rounds, timeout_s=1800)[0])
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Two devices of speeds 1 and 2: what planning with both speeds gains over equal batches.

    python -m benchmarks.speeds [--quick] [--json]

The real engine over two emulated devices (`benchmarks.emulation`) at full model sizes: SD 2.1 and
ControlNet at 512 px, 32 samples a rank, from the estimated A100 profiles in conf/profiles; the slow
device takes twice as long for everything. The ideal is 1.5: the speeds' mean over the slower one.
All times are stretched, so that what the host needs is small beside them.

* "equal batches" is DDP: each device has its own samples, all wait for the slow one, which runs
  alone, undisturbed, on its best plan. "equal shares" is the same with both in one group.
* "shares" is one stage on both devices, rows and encoders by speed; "planned" is the search's plan.
Baseline is the faster of the first two, the first without gradient sums; figures are medians, of
the worse model.
"""

import statistics
import sys
from dataclasses import replace

from benchmarks.common import Report, parser, show
from benchmarks.emulation import Case, emulate
from benchmarks.fill_emulated import MODELS, PROFILES, ROWS
from lightning_dpipe.core.fleet import fleet
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import ComponentCost, LayerCost, Profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.planning.variants import with_fills
from lightning_dpipe.simulation.simulate import simulate

SLOW, FAST = 0, 1
SLOWDOWN, STRETCH = 2, 2


def slowed(profile: Profile, factor: int) -> Profile:
    """The same model on a device that takes `factor` as long for everything."""

    def layer(cost: LayerCost) -> LayerCost:
        return replace(
            cost,
            forward_us=tuple(factor * t for t in cost.forward_us),
            backward_us=tuple(factor * t for t in cost.backward_us),
            input_grad_us=tuple(factor * t for t in cost.input_grad_us),
            optimizer_us=factor * cost.optimizer_us,
        )

    def component(cost: ComponentCost) -> ComponentCost:
        return replace(cost, layers=tuple(map(layer, cost.layers)))

    costs = tuple(map(component, profile.costs))
    return replace(profile, costs=costs, device=f"{profile.device}, {factor} x slower")


def plans(profile: Profile) -> dict[str, tuple[Profile, Plan]]:
    """What runs, each with the profile of its devices."""
    slow = profile.of_kind(profile.kinds[SLOW])
    alone = make_plan(slow, world_size=1, batch_size=ROWS, num_stages="auto")
    shares = make_plan(profile, world_size=2, batch_size=ROWS, num_stages=1)
    (stage,) = shares.stages
    equal = replace(shares, stages=(replace(stage, shares=()),), fills=())
    return {
        "equal batches": (slow, alone),
        "equal shares": (profile, with_fills(equal, profile)),
        "shares": (profile, shares),
        "planned": (
            profile, make_plan(profile, world_size=2, batch_size=ROWS, num_stages="auto")
        ),
    }  # fmt: skip


def run(report: Report, rounds: int) -> None:
    """Fill the report's rows and figures."""
    ratios: dict[str, list[float]] = {"planned": [], "shares": []}
    errors = []
    for model in MODELS:
        fast = load(Profile, PROFILES / f"{model}_a100_bf16.json")
        took: dict[str, float] = {}
        for name, (profile, plan) in plans(fleet([slowed(fast, SLOWDOWN), fast], (0, 1))).items():
            show(f"{model}, {name} ...")
            said = simulate(plan, schedule_of(plan), profile)
            found = emulate(profile, {name: Case(plan=plan)}, rounds=rounds, scale=STRETCH)
            timelines = found[name]
            took[name] = statistics.median(t.end_us for t in timelines) / STRETCH
            errors.append(abs(said.end_us - took[name]) / took[name])
            report.rows.append(
                {"model": model, "iteration": name, "measured_ms": took[name] / 1e3,
                 "predicted_ms": said.end_us / 1e3, "error": errors[-1],
                 "bubble": statistics.median(t.bubble_ratio for t in timelines),
                 "stages": " | ".join(
                     f"{s.start}:{s.stop} on {','.join(str(plan.groups[0][d]) for d in s.devices)}"
                     + (f" by {':'.join(map(str, s.shares))}" if s.shares else "")
                     for s in plan.stages
                 )}
            )  # fmt: skip
        baseline = min(took["equal batches"], took["equal shares"])
        for name, values in ratios.items():
            values.append(baseline / took[name])
    report.figures = {
        "over_equal_ddp": min(ratios["planned"]),
        "shares_over_equal_ddp": min(ratios["shares"]),
        "prediction_error": max(errors),
    }
    report.bar("over_equal_ddp", ">=", 1.45)
    report.bar("prediction_error", "<=", 0.05)


def main() -> int:
    """Measure every plan of both models."""
    options = parser(__doc__).parse_args()
    report = Report("speeds")
    run(report, rounds=3 if options.quick else 7)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Frozen work that moves between devices: the real engine over emulated devices, uneven stages.

SD 2.1 and ControlNet at 512 px, from the estimated A100 profiles in conf/profiles, in two stages of
which the first has about three fifths or two fifths of the work, as memory or a slower device may
ask for. Each plan is filled with every sample at home, and with samples moved; the two run in turn
and are compared with what the simulator says.
"""

import statistics
import sys
from dataclasses import replace

from benchmarks.common import Report, parser, show
from benchmarks.emulation import Case, emulate
from benchmarks.fill_emulated import MODELS, PROFILES
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.filling import fill
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate

ROWS = 32


def uneven(profile: Profile, share: float) -> Plan:
    """Two stages, the first with about a share of the backbone's forward time; not filled."""
    (backbone,) = profile.graph.backbones
    times = [profile.forward_us(backbone.name, i, i + 1, ROWS) for i in range(len(backbone.layers))]
    cut = next(i for i in range(1, len(times)) if sum(times[:i]) >= share * sum(times))
    return make_plan(
        profile, world_size=2, batch_size=ROWS, num_microbatches=4, cuts=(cut,), fill=False
    )


def run(report: Report, rounds: int) -> None:
    """Fill the report's rows and figures."""
    speedups, errors = [], []
    for model in MODELS:
        profile = load(Profile, PROFILES / f"{model}_a100_bf16.json")
        for share in (0.4, 0.6):
            show(f"{model}, {share:.0%} of the work in stage 0 ...")
            plan = uneven(profile, share)
            schedule = schedule_of(plan)
            plans = {
                name: replace(plan, fills=fill(plan, schedule, profile, move=name == "moved"))
                for name in ("at home", "moved")
            }
            cases = {name: Case(plan=filled) for name, filled in plans.items()}
            found = emulate(profile, cases, rounds=rounds)
            took = {n: statistics.median(t.end_us for t in x) for n, x in found.items()}
            for name, filled in plans.items():
                said_us = simulate(filled, schedule, profile).end_us
                errors.append(abs(said_us - took[name]) / took[name])
                report.rows.append(
                    {"model": model, "stage_0": share, "samples": name,
                     "measured_ms": took[name] / 1e3, "predicted_ms": said_us / 1e3,
                     "error": errors[-1]}
                )  # fmt: skip
            speedups.append(took["at home"] / took["moved"])
    report.figures = {
        "speedup_least": min(speedups),
        "speedup_median": statistics.median(speedups),
        "prediction_error": max(errors),
    }
    report.bar("prediction_error", "<=", 0.03)
    report.bar("speedup_least", ">=", 1.0)


def main() -> int:
    """Command line."""
    options = parser(__doc__).parse_args()
    report = Report(bench="moves")
    run(report, rounds=3 if options.quick else 9)
    return report.finish(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

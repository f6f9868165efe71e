"""`benchmarks.fill --emulate D`: the real engine over D emulated devices, at full model sizes.

SD 2.1 and ControlNet at 512 px, from the estimated A100 profiles in conf/profiles: layers sleep for
their time, links are as slow as the profile says (`benchmarks.emulation`). Each model runs
unfilled, filled as DiffusionPipe's greedy would, and filled by us; the figures are the worse
model's. Optimizer and gradient sums are not part of an emulated iteration.
"""

import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Report, show
from benchmarks.emulation import emulate
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import ComponentCost, Profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.simulate import simulate

PROFILES = Path(__file__).resolve().parents[1] / "conf" / "profiles"
MODELS = ("sd21", "controlnet")
ROWS = 32


def without_optimizer(profile: Profile) -> Profile:
    """The profile of what an emulated iteration does."""

    def free(cost: ComponentCost) -> ComponentCost:
        return replace(cost, layers=tuple(replace(x, optimizer_us=0) for x in cost.layers))

    return replace(profile, costs=tuple(map(free, profile.costs)))


def plans(profile: Profile, devices: int) -> dict[str, Plan]:
    """One cut, three ways to run the frozen work."""
    ours, greedy = (
        make_plan(
            profile, world_size=devices, batch_size=ROWS, num_stages=devices,
            num_microbatches=2 * devices, fill=fill,
        )
        for fill in (True, "paper")
    )  # fmt: skip
    return {"unfilled": replace(ours, fills=()), "greedy": greedy, "filled": ours}


def run(report: Report, devices: int, steps: int) -> None:
    """Fill the report's rows and figures."""
    speedups, errors = [], []
    for model in MODELS:
        profile = without_optimizer(load(Profile, PROFILES / f"{model}_a100_bf16.json"))
        took: dict[str, float] = {}
        for name, plan in plans(profile, devices).items():
            show(f"{model}, {devices} devices, {name} ...")
            said = simulate(plan, schedule_of(plan), profile)
            timelines = emulate(profile, plan, steps=steps)
            took[name] = statistics.median(t.end_us for t in timelines)
            bubble = statistics.median(t.bubble_ratio for t in timelines)
            errors.append(abs(said.end_us - took[name]) / took[name])
            report.rows.append(
                {"model": model, "iteration": name, "measured_ms": took[name] / 1e3,
                 "predicted_ms": said.end_us / 1e3, "error": errors[-1], "bubble": bubble,
                 "predicted_bubble": said.bubble_ratio}
            )  # fmt: skip
        speedups.append(took["unfilled"] / took["filled"])
    bubbles = {
        name: max(row["bubble"] for row in report.rows if row["iteration"] == name)
        for name in ("filled", "unfilled")
    }
    report.figures = {
        "bubble_filled": bubbles["filled"],
        "bubble_unfilled": bubbles["unfilled"],
        "prediction_error": max(errors),
        "speedup": min(speedups),
        "loss_no_fill": 1 - 1 / min(speedups),
    }
    report.bar("prediction_error", "<=", 0.03)

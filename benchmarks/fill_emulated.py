"""`benchmarks.fill --emulate D`: the real engine over D emulated devices, at full model sizes.

SD 2.1 and ControlNet at 512 px, 32 samples a device, from the estimated A100 profiles in
conf/profiles: layers take their time, links are as slow as the profile says, gradient sums and
optimizer steps too (`benchmarks.emulated_device`). All times are stretched by `scale`, so that
what the host needs for D devices is small beside them.

Two plans, each one pipeline of D devices:
* "search": stages (replicated), cuts and micro-batches are the search's; of the fastest plan for
  each number of stages, the fastest of those whose filled bubbles are predicted to be at most 1 %.
* "deep": one stage a device. Its bubbles are shorter, so that partial batches matter; its stages
  are less balanced, and what the slowest leaves idle beyond the frozen work stays a bubble.
Each runs filled and unfilled, in turn; "search" also with 10 % lognormal jitter on every op, the
same for both; "deep" also without partial batches ("whole") and as DiffusionPipe's greedy fills.

Figures are medians over rounds, of the worse model. An iteration is measured by the host's clock;
what it takes longer than by the clocks of the devices (`devices_ms`) is the host's lateness. The
losses of throughput are those of "deep" for ControlNet, which lost 10.9 % without partial batches
and 17.6 % without filling in the paper.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import OUT, Report, show
from benchmarks.emulation import Case, emulate
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.auto import Space, search
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.variants import with_fills
from lightning_dpipe.simulation.render import save_png
from lightning_dpipe.simulation.simulate import simulate

PROFILES = Path(__file__).resolve().parents[1] / "conf" / "profiles"
MODELS = ("sd21", "controlnet")
ABLATED = "controlnet"
ROWS = 32
JITTER = 0.1
SMALL_BUBBLE = 0.01


def predicted(plan: Plan, profile: Profile) -> Timeline:
    """What the plan's steady iteration is said to look like."""
    return simulate(plan, schedule_of(plan), profile)


def plans(profile: Profile, devices: int) -> tuple[Plan, Plan]:
    """The plans "search" and "deep"."""
    found = []
    for stages in range(2, devices + 1):
        space = Space(group_devices=devices, num_stages=stages)
        found.append(search(profile, world_size=devices, batch_size=ROWS, space=space).plan)

    def rank(plan: Plan) -> tuple[bool, int]:
        timeline = predicted(plan, profile)
        return timeline.bubble_ratio > SMALL_BUBBLE, timeline.end_us

    return min(found, key=rank), found[-1]


def cases_of(profile: Profile, devices: int) -> dict[str, Case]:
    """Every plan, its frozen work run in several ways."""
    plan, deep = plans(profile, devices)
    unfilled = replace(plan, fills=())
    return {
        "filled": Case(plan=plan),
        "unfilled": Case(plan=unfilled),
        "filled, jitter": Case(plan=plan, jitter=JITTER),
        "unfilled, jitter": Case(plan=unfilled, jitter=JITTER),
        "deep filled": Case(plan=deep),
        "deep whole": Case(plan=with_fills(deep, profile, fill="whole")),
        "deep greedy": Case(plan=with_fills(deep, profile, fill="paper")),
        "deep unfilled": Case(plan=replace(deep, fills=())),
    }


@dataclass(frozen=True)
class Outcome:
    """One model: per case the measured iterations in ms (unstretched), bubbles and errors."""

    times_ms: Mapping[str, Sequence[float]]
    bubbles: Mapping[str, float]
    errors: Mapping[str, float]
    predicted_bubble: float

    def over(self, slow: str, fast: str) -> float:
        """Ratio of median iterations."""
        return statistics.median(self.times_ms[slow]) / statistics.median(self.times_ms[fast])

    def gain(self, suffix: str = "") -> float:
        """What filling adds to throughput."""
        return self.over("unfilled" + suffix, "filled" + suffix) - 1

    def loss(self, kind: str) -> float:
        """Throughput lost against the filled deep pipeline."""
        return 1 - self.over("deep filled", f"deep {kind}")


def shape_of(plan: Plan) -> str:
    """Devices of each stage and micro-batches, as ``2+2 M4``."""
    return f"{'+'.join(str(len(s.devices)) for s in plan.stages)} M{plan.num_microbatches}"


def measure(report: Report, model: str, devices: int, rounds: int, scale: float) -> Outcome:
    """Run one model and add its rows."""
    profile = load(Profile, PROFILES / f"{model}_a100_bf16.json")
    cases = cases_of(profile, devices)
    show(f"{model}, {devices} devices: {len(cases)} cases, {rounds} rounds ...")

    def progress(done: int) -> None:
        show(f"  {model}: {done}/{rounds} rounds")

    measured = emulate(profile, cases, rounds=rounds, scale=scale, progress=progress)
    times, bubbles, errors = {}, {}, {}
    for name, case in cases.items():
        said = predicted(case.plan, profile)
        times[name] = [t.end_us / 1e3 / scale for t in measured[name]]
        took_ms = statistics.median(times[name])
        devices_ms = statistics.median(max(s.end_us for s in t.spans) for t in measured[name])
        bubbles[name] = statistics.median(t.bubble_ratio for t in measured[name])
        if not case.jitter:
            errors[name] = abs(said.end_us / 1e3 - took_ms) / took_ms
        report.rows.append(
            {"model": model, "iteration": name, "plan": shape_of(case.plan), "measured_ms": took_ms,
             "fastest_ms": min(times[name]), "slowest_ms": max(times[name]),
             "devices_ms": devices_ms / 1e3 / scale,
             "predicted_ms": said.end_us / 1e3, "error": errors.get(name), "bubble": bubbles[name],
             "predicted_bubble": said.bubble_ratio, "rounds": rounds}
        )  # fmt: skip
    names = ("unfilled", "filled", "deep unfilled", "deep filled")
    save_png(
        [measured[name][-1] for name in names],
        OUT / f"fill_emulated_{model}_{devices}.png",
        title="\n".join((f"{model}, {devices} emulated devices, times x {scale:g}", *names)),
    )
    return Outcome(times, bubbles, errors, predicted(cases["filled"].plan, profile).bubble_ratio)


def run(report: Report, devices: int, *, rounds: int, scale: float) -> None:
    """Fill the report's rows and figures."""
    found = {m: measure(report, m, devices, rounds, scale) for m in MODELS}
    each = found.values()
    jitter = ", jitter"
    pairs = [
        pair
        for x in each
        for pair in zip(x.times_ms["filled" + jitter], x.times_ms["unfilled" + jitter], strict=True)
    ]
    report.figures = {
        "bubble_filled": max(x.bubbles["filled"] for x in each),
        "bubble_filled_predicted": max(x.predicted_bubble for x in each),
        "bubble_unfilled": max(x.bubbles["unfilled"] for x in each),
        "prediction_error": max(e for x in each for e in x.errors.values()),
        "speedup": 1 + min(x.gain() for x in each),
        "speedup_deep": min(x.over("deep unfilled", "deep filled") for x in each),
        "loss_no_partial": found[ABLATED].loss("whole"),
        "loss_no_fill": found[ABLATED].loss("unfilled"),
        "loss_greedy": found[ABLATED].loss("greedy"),
        "speedup_jitter": 1 + min(x.gain(jitter) for x in each),
        "gain_kept_jitter": min(x.gain(jitter) / x.gain() for x in each),
        "slower_with_jitter": sum(filled > unfilled for filled, unfilled in pairs),
        "scale": scale,
    }
    report.bar("bubble_filled", "<=", 0.03)
    report.bar("bubble_filled_predicted", "<=", SMALL_BUBBLE)
    report.bar("prediction_error", "<=", 0.03)
    report.bar("gain_kept_jitter", ">=", 0.9)
    report.bar("slower_with_jitter", "==", 0)

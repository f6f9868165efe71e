"""A plan in words: its stages, why it was chosen, and what keeps it from being faster.

In:     a plan, its profile, its predicted timeline, and the baselines it was compared with.
Out:    text, and `Limit`s: shares of the device time that are not useful work. Every figure is
        computed from the prediction; nothing here plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dpipe.core.fleet import device_profiles
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import PIPELINE, Activity, Timeline
from lightning_dpipe.planning.baselines import Alternative, least_work_us
from lightning_dpipe.planning.filling import lower_bound_us
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.memory import DeviceMemory
from lightning_dpipe.simulation.simulate import simulate

_WORTH_SAYING = 0.01
"""Shares of the device time below this are left out."""

_NEARLY_FULL = 0.9
_MUCH = 1.05
"""A device with this many times the mean load is called slow."""


def explain(plan: Plan, profile: Profile) -> str:
    """Table of the stages and what the plan is predicted to cost, as training logs it."""
    rows = max(split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches))
    schedule = schedule_of(plan)
    unfilled = simulate(replace(plan, fills=()), schedule, profile)
    timeline = simulate(plan, schedule, profile)
    per_step = plan.batch_size * plan.world_size
    lines = [
        stage_table(plan, profile),
        "",
        f"{len(plan.groups)} x {plan.num_devices} devices, schedule {plan.schedule}, "
        f"{plan.num_microbatches} micro-batches of {rows} samples, global batch {per_step}",
        f"iteration {timeline.end_us / 1e3:.2f} ms "
        f"(frozen work up front {unfilled.end_us / 1e3:.2f} ms, "
        f"lower bound {lower_bound_us(plan, profile) / 1e3:.2f} ms), "
        f"{per_step * 1e6 / max(timeline.end_us, 1):.1f} samples/s",
        f"bubble ratio {timeline.bubble_ratio:.1%} (unfilled {unfilled.bubble_ratio:.1%}), "
        f"fill ratio {timeline.fill_ratio:.1%}, "
        f"{sum(not f.self_conditioned for f in plan.fills)} fills",
    ]
    if profile.estimated:
        lines.append("times are estimated, not measured")
    return "\n".join(lines)


def stage_table(plan: Plan, profile: Profile) -> str:
    """One line a stage: layers, times of a micro-batch, weights, devices, first and last layer."""
    rows = max(split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches))
    prefix, own = len(plan.chains) > 1, device_profiles(plan, profile)
    lines = ["stage  layers     forward    backward   parameters  devices    from .. to"]
    for i, s in enumerate(plan.stages):
        span = (s.backbone, s.start, s.stop)
        costs = profile.component(s.backbone).layers[s.start : s.stop]
        names = [layer.name for layer in profile.graph.component(s.backbone).layers]
        owner = f"{s.backbone}." if prefix else ""
        suffix = " recompute" if s.recompute else ""
        shares = [(own[d], n) for d, n in zip(s.devices, s.split(rows), strict=True)]
        homes = ", ".join(map(str, s.devices))
        if s.shares:
            homes += f" by {':'.join(map(str, s.shares))}"
        lines.append(
            f"{i:>5}  {f'{s.start}:{s.stop}':<9}"
            f"{max(p.forward_us(*span, n) for p, n in shares) / 1e3:>6.2f} ms"
            f"{max(p.backward_us(*span, n) for p, n in shares) / 1e3:>9.2f} ms"
            f"{sum(c.param_bytes for c in costs) / 1e6:>10.2f} MB"
            f"  {homes:<9}"
            f"  {owner}{names[s.start]} .. {names[s.stop - 1]}{suffix}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that keeps the iteration from being shorter, and its share of the device time.

    `kind` is one of frozen_work, bubble, slowest_stage, sync, transfer, small_batches, recompute,
    memory, optimizer, overhead.
    """

    kind: str
    share: float
    text: str


def limits(
    plan: Plan,
    profile: Profile,
    unfilled: Timeline,
    timeline: Timeline,
    memory: Sequence[DeviceMemory],
) -> tuple[Limit, ...]:
    """What limits a plan, the largest share of the device time first.

    Args:
        plan: The plan.
        profile: Costs, with the links that the plan's pipelines see.
        unfilled: Prediction with the frozen work up front, without self-conditioning.
        timeline: Prediction as planned, without self-conditioning.
        memory: What each device holds.
    """
    total_us = max(timeline.num_devices * timeline.end_us, 1)
    found = [
        *_waits(timeline, total_us),
        *_frozen(unfilled, timeline, total_us),
        *_loads(timeline, total_us),
        *_small(plan, profile, timeline, total_us),
        *_memory(plan, profile, memory, total_us),
    ]
    kept = [x for x in found if x.share >= _WORTH_SAYING or x.kind == "memory"]
    return tuple(sorted(kept, key=lambda limit: -limit.share))


def _waits(timeline: Timeline, total_us: int) -> list[Limit]:
    """Time in which a device waits for the network, or works beside the model."""
    words = {
        Activity.SYNC: ("sync", "the gradient sum that no backward hides"),
        Activity.TRANSFER: ("transfer", "waiting for messages that are on their way"),
        Activity.OPTIMIZER: ("optimizer", "the optimizer step"),
        Activity.HOST: ("overhead", "the host: handing over rows, the loop around the step"),
    }
    found = []
    for activity, (kind, what) in words.items():
        spent_us = timeline.total_us(activity)
        each_ms = spent_us / timeline.num_devices / 1e3
        found.append(
            Limit(kind=kind, share=spent_us / total_us, text=f"{what}: {each_ms:.2f} ms a device")
        )
    return found


def _frozen(unfilled: Timeline, timeline: Timeline, total_us: int) -> list[Limit]:
    """Whether frozen work or bubbles ran out first."""
    devices = timeline.num_devices
    frozen_us = timeline.total_us(Activity.FROZEN)
    outside_us = round(frozen_us * (1 - timeline.fill_ratio))
    frozen_ms, bubble_ms = frozen_us / devices / 1e3, unfilled.bubble_us / devices / 1e3
    found = []
    if outside_us and devices == 1:
        found.append(
            Limit(
                kind="frozen_work",
                share=outside_us / total_us,
                text=f"frozen work, {frozen_ms:.2f} ms a device, which no bubble takes up (a "
                "single device has none but its gradient sum); encodings kept on disk would save "
                "it",
            )
        )
    elif outside_us:
        found.append(
            Limit(
                kind="frozen_work",
                share=outside_us / total_us,
                text=f"more frozen work ({frozen_ms:.2f} ms a device) than fits into the bubbles "
                f"({bubble_ms:.2f} ms): {outside_us / devices / 1e3:.2f} ms of it lengthen the "
                "iteration",
            )
        )
    left_us = timeline.bubble_us
    why = "no frozen work is left for them" if frozen_us else "the model has no frozen work"
    if outside_us:
        why = "pieces of frozen work are too coarse for what is left of them"
    found.append(
        Limit(
            kind="bubble",
            share=left_us / total_us,
            text=f"bubbles, {left_us / devices / 1e3:.2f} ms a device of {bubble_ms:.2f} ms "
            f"unfilled: {why}",
        )
    )
    return found


def _loads(timeline: Timeline, total_us: int) -> list[Limit]:
    """The device with most pipeline work, where the others could be as busy only by waiting."""
    loads_us = [
        sum(s.length_us for s in timeline.spans if s.device == d and s.activity in PIPELINE)
        for d in range(timeline.num_devices)
    ]
    mean_us = sum(loads_us) / len(loads_us)
    slowest = max(range(len(loads_us)), key=loads_us.__getitem__)
    if not mean_us or loads_us[slowest] < _MUCH * mean_us:
        return []
    above_us = loads_us[slowest] - mean_us
    return [
        Limit(
            kind="slowest_stage",
            share=above_us * timeline.num_devices / total_us,
            text=f"the slowest stage, on device {slowest}: {loads_us[slowest] / 1e3:.2f} ms of "
            f"pipeline work, {loads_us[slowest] / mean_us - 1:.0%} above the mean",
        )
    ]


def _small(plan: Plan, profile: Profile, timeline: Timeline, total_us: int) -> list[Limit]:
    """What micro-batches, partial batches and recomputation cost over full batches."""
    devices = timeline.num_devices
    busy_us = timeline.total_us(PIPELINE | {Activity.FROZEN})
    again_us = sum(
        profile.forward_us(s.backbone, s.start, s.stop, -(-size // len(s.devices))) * len(s.devices)
        for s in plan.stages
        if s.recompute
        for size in split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches)
    )
    least_us = round(devices * least_work_us(profile, plan.batch_size, num_devices=devices))
    small_us = max(busy_us - again_us - least_us, 0)
    rows = max(split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches))
    return [
        Limit(
            kind="small_batches",
            share=small_us / total_us,
            text=f"batches below the best size: micro-batches of {rows} and parts of the frozen "
            f"batch take {small_us / devices / 1e3:.2f} ms a device more than full ones",
        ),
        Limit(
            kind="recompute",
            share=again_us / total_us,
            text="activations that do not fit are computed again: "
            f"{again_us / devices / 1e3:.2f} ms a device",
        ),
    ]


def _memory(
    plan: Plan, profile: Profile, memory: Sequence[DeviceMemory], total_us: int
) -> list[Limit]:
    room = profile.memory_bytes
    peak = max(m.total_bytes for m in memory)
    if room is None or (peak < _NEARLY_FULL * room and not any(s.recompute for s in plan.stages)):
        return []
    return [
        Limit(
            kind="memory",
            share=0.0,
            text=f"memory: {peak / 2**30:.1f} of {room / 2**30:.1f} GiB on the fullest device; "
            "larger micro-batches or fewer stages would not fit",
        )
    ]


def reasons(
    alternatives: Sequence[Alternative],
    *,
    given: Mapping[str, object],
    num_plans: int | None,
    bound_us: float | None,
    margin: float = 0.0,
) -> tuple[str, ...]:
    """Why this plan, in sentences.

    Args:
        alternatives: What `baselines.compare` found; the plan itself comes first.
        given: Numbers that were not the planner's to choose, by name.
        num_plans: How many plans the search simulated; None if nothing was left to it.
        bound_us: What no plan of the searched space beats.
        margin: What the search took for a tie.
    """
    plan, by_name = alternatives[0], {a.name: a for a in alternatives}
    lines = []
    if num_plans is not None and bound_us is not None:
        first = f"It is the fastest of {num_plans} plans that were simulated"
        if margin:
            first = (
                f"Of {num_plans} plans that were simulated it is the one of the fewest stages and "
                f"micro-batches within {_percent(margin)} of the fastest"
            )
        if num_plans == 1:
            first = "It is the first plan that was simulated, the one of the lowest bound"
        lines.append(
            f"{first}; no plan that was left out can end before {bound_us / 1e3:.2f} ms "
            f"({_percent(plan.iteration_us / max(bound_us, 1) - 1)} sooner)."
        )
    if given:
        fixed = ", ".join(f"{name}={value}" for name, value in given.items())
        lines.append(f"Given, not chosen: {fixed}; auto would search.")
    elif num_plans is None:
        lines.append("One stage a rank, 4 micro-batches a stage: auto would search.")
    unfilled = by_name.get("plan_unfilled")
    if unfilled is not None:
        what = "Filling bubbles" if plan.num_stages > 1 else "Encoding under the gradient sum"
        lines.append(
            f"{what} makes it {_faster(unfilled, plan)} than the same cut with the frozen work up "
            "front."
        )
    ddp = by_name["ddp_overlapped"]
    lines.append(_against_ddp(plan, ddp, by_name["ddp"]))
    paper = by_name.get("paper")
    if paper is not None:
        lines.append(f"It is {_faster(paper, plan)} than what DiffusionPipe's own planner chooses.")
    return tuple(lines)


def _against_ddp(plan: Alternative, overlapped: Alternative, plain: Alternative) -> str:
    if overlapped.fits is False:
        return (
            f"Data parallelism does not fit: it needs {overlapped.peak_bytes / 2**30:.1f} GiB a "
            "device even with one sample at a time."
        )
    gradients = f"{plain.sync_us / 1e3:.2f} ms of gradient sum"
    exposed = f"{overlapped.sync_us / 1e3:.2f} ms of it stay exposed with overlapped buckets"
    what = "data parallelism itself" if plan.num_stages == 1 else "a pipeline"
    return (
        f"It is {what}, {_faster(overlapped, plan)} than DDP, which pays for {gradients} a step; "
        f"{exposed}."
    )


def _faster(other: Alternative, plan: Alternative) -> str:
    gain = other.iteration_us / max(plan.iteration_us, 1) - 1
    if abs(gain) < 0.0005:
        return "no faster or slower"
    return f"{_percent(abs(gain))} {'faster' if gain > 0 else 'slower'}"


def _percent(share: float) -> str:
    return f"{share:.1%}"

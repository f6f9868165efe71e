"""A solution as people read it, and as programs do.

In: a Solution. Out: text in parts, and plain JSON data with the same numbers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_dpipe.core.jsonio import to_data
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.baselines import Alternative
from lightning_dpipe.planning.explain import Limit, stage_table
from lightning_dpipe.planning.traffic import Traffic
from lightning_dpipe.simulation.memory import DeviceMemory
from lightning_dpipe.simulation.render import ascii_chart

if TYPE_CHECKING:
    from lightning_dpipe.cli.solve import Solution


def text(solution: "Solution", place: str) -> str:
    """The whole report."""
    plan, profile = solution.plan, solution.profile
    parts = [
        head(plan, profile, place),
        stage_table(plan, profile),
        device_table(solution.memory, solution.traffic, profile),
        prediction(solution.unfilled, solution.filled) + "\n" + expectation(solution),
        ascii_chart(solution.filled),
        alternatives_table(solution.alternatives),
        "Why this plan:\n" + _wrapped(solution.reasons),
        "What limits it:\n" + limits_text(solution.limits),
    ]
    return "\n\n".join(parts)


def head(plan: Plan, profile: Profile, place: str) -> str:
    """Model, hardware and shape in three lines."""
    frozen = {c.name for c in profile.graph.frozen}
    model = ", ".join(
        f"{c.name} ({counted(len(c.layers), 'layer')}{', frozen' if c.name in frozen else ''})"
        for c in profile.graph.components
    )
    rows = max(split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches))
    how = "ESTIMATED (roofline), not measured" if profile.estimated else "measured"
    shape = (
        f"{len(plan.groups)} x {plan.num_devices} devices, {plan.stage_counts} stages, "
        f"{plan.schedule}"
    )
    if plan.num_devices == 1:
        shape = f"data parallel, {plan.world_size} replicas"
        if len(plan.stages) > 1:
            shape += f", gradients summed in {len(plan.stages)} parts (the stages)"
    return (
        f"model     {model}\n"
        f"devices   {place}, {profile.dtype}; times are {how}\n"
        f"plan      {shape}, {counted(plan.num_microbatches, 'micro-batch')} of {rows} samples; "
        f"global batch {plan.batch_size * plan.world_size} ({plan.batch_size} per device)"
    )


def device_table(
    memory: Sequence[DeviceMemory], traffic: Sequence[Traffic], profile: Profile
) -> str:
    """Memory and traffic of each device of one pipeline group."""
    lines = [
        "        memory, GiB                                            traffic, MB",
        "                                                                a micro-batch     rows "
        "of a batch",
        "device  weights  frozen  gradients  optimizer  activations  total   sent received"
        "    out      in",
    ]
    for device, (m, t) in enumerate(zip(memory, traffic, strict=True)):
        gib = [
            x / 2**30
            for x in (
                m.weights_bytes, m.frozen_bytes, m.gradient_bytes, m.optimizer_bytes,
                m.activation_bytes, m.total_bytes,
            )
        ]  # fmt: skip
        mb = [x / 1e6 for x in (t.sent_bytes, t.received_bytes, t.rows_out_bytes, t.rows_in_bytes)]
        lines.append(
            f"{device:>6}  {gib[0]:>7.2f} {gib[1]:>7.2f} {gib[2]:>10.2f} {gib[3]:>10.2f} "
            f"{gib[4]:>12.2f} {gib[5]:>6.2f} {mb[0]:>6.1f} {mb[1]:>8.1f} "
            f"{mb[2]:>6.1f} {mb[3]:>7.1f}"
        )
    if profile.memory_bytes is not None:
        lines.append(
            f"a device has {profile.memory_bytes / 2**30:.2f} GiB; message buffers and the "
            "allocator's slack are not counted"
        )
    return "\n".join(lines)


def prediction(unfilled: Timeline, filled: Timeline) -> str:
    """Iteration and ratios of one step without self-conditioning, as in the chart."""
    return (
        f"iteration {filled.end_us / 1e3:.2f} ms ({unfilled.end_us / 1e3:.2f} ms with the frozen "
        f"work up front), bubble ratio {filled.bubble_ratio:.1%} (unfilled "
        f"{unfilled.bubble_ratio:.1%}), fill ratio {filled.fill_ratio:.1%}"
    )


def expectation(solution: "Solution") -> str:
    """Mean over the steps with and without self-conditioning: what the table compares."""
    mean = solution.alternatives[0]
    conditioned = any(f.self_conditioned for f in solution.plan.fills)
    over = " with self-conditioned steps" if conditioned else ""
    return (
        f"{mean.samples_per_s:.1f} samples/s ({mean.iteration_us / 1e3:.2f} ms a step on average"
        f"{over}), useful ratio {solution.useful_ratio:.1%}"
    )


def alternatives_table(rows: Sequence[Alternative]) -> str:
    """One line each; speeds relative to DDP with overlapped buckets."""
    ddp = next(r for r in rows if r.name == "ddp_overlapped")
    lines = [
        "                         iteration   samples/s   vs DDP   exposed sum    memory",
    ]
    for r in rows:
        lines.append(
            f"{r.label:<24}{r.iteration_us / 1e3:>7.2f} ms {r.samples_per_s:>11.1f} "
            f"{r.samples_per_s / ddp.samples_per_s:>7.2f}x {r.sync_us / 1e3:>10.2f} ms "
            f"{r.peak_bytes / 2**30:>6.2f} GiB"
            f"{'  DOES NOT FIT' if r.fits is False else ''}  {r.detail}"
        )
    return "\n".join(lines)


def limits_text(limits: Sequence[Limit]) -> str:
    """One line each, with the share of the device time."""
    if not limits:
        return "  nothing above 1% of the device time: it is useful work"
    lines = [f"  {f'{x.share:.1%}' if x.share else '':>6}  {x.text}" for x in limits]
    if sum(x.share for x in limits) > 1:
        lines.append("  causes overlap: a slow stage is also the reason for other devices' bubbles")
    return "\n".join(lines)


def figures(plan: Plan, unfilled: Timeline, filled: Timeline) -> dict[str, Any]:
    """The numbers of a plan, flat."""
    samples = plan.batch_size * plan.world_size
    return {
        "world_size": plan.world_size,
        "num_stages": len(plan.stages),
        "num_replicas": len(plan.groups),
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "batch_size": plan.batch_size,
        "global_batch": samples,
        "cuts": [stage.start for stage in plan.stages[1:]],
        "num_fills": len(plan.fills),
        "iteration_us_unfilled": unfilled.end_us,
        "iteration_us_filled": filled.end_us,
        "bubble_ratio_unfilled": unfilled.bubble_ratio,
        "bubble_ratio_filled": filled.bubble_ratio,
        "fill_ratio": filled.fill_ratio,
        "samples_per_s": samples * 1e6 / max(filled.end_us, 1),
    }


def data(solution: "Solution") -> dict[str, Any]:
    """Everything of the report, for programs."""
    plan, profile = solution.plan, solution.profile
    return figures(plan, solution.unfilled, solution.filled) | {
        "estimated": profile.estimated,
        "device": profile.device,
        "dtype": profile.dtype,
        "memory_bytes": profile.memory_bytes,
        "expected_iteration_us": solution.alternatives[0].iteration_us,
        "useful_ratio": solution.useful_ratio,
        "num_plans": solution.num_plans,
        "stages": [
            to_data(stage) | {"layers": names(profile, stage.backbone)[stage.start : stage.stop]}
            for stage in plan.stages
        ],
        "memory": [to_data(m) | {"total_bytes": m.total_bytes} for m in solution.memory],
        "traffic": to_data(solution.traffic),
        "ledger_us": solution.filled.ledger(),
        "alternatives": to_data(solution.alternatives),
        "reasons": list(solution.reasons),
        "limits": to_data(solution.limits),
    }


def counted(count: int, noun: str) -> str:
    """ "1 layer", "2 micro-batches"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun[-1] == 'h' else 's'}"


def names(profile: Profile, component: str) -> list[str]:
    """Names of a component's layers."""
    return [layer.name for layer in profile.graph.component(component).layers]


def _wrapped(sentences: Sequence[str]) -> str:
    return "\n".join(f"  {sentence}" for sentence in sentences)

"""Peak memory of each device under a plan, from the profile's bytes.

Counted: weights of the device's stages, their gradients and AdamW moments, all frozen components
(every rank encodes), and the activations in flight along the schedule. Not counted:
message buffers, encodings and the allocator's slack; leave a margin for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from lightning_dpipe.core.crossings import stage_reads
from lightning_dpipe.core.fleet import device_profiles
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan, split_sizes
from lightning_dpipe.core.profile import Profile, interpolate
from lightning_dpipe.core.schedule import Schedule

MOMENTS_PER_WEIGHT = 2
"""AdamW keeps two tensors a weight, of the weight's dtype (8 bytes a weight in fp32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What one device holds at its peak, in bytes.

    `weights_bytes` and what follows are of its stages; `frozen_bytes` is all frozen components.
    """

    weights_bytes: int
    frozen_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self))


def peak_bytes(plan: Plan, schedule: Schedule, profile: Profile) -> tuple[int, ...]:
    """Largest number of bytes each device of a pipeline group holds during one step.

    Raises:
        PlanError: Groups are of unequal speed.
        ProfileError: The profile lacks a component of the plan.
        SpecError: The profile's graph lacks one.
    """
    return tuple(memory.total_bytes for memory in peak_memory(plan, schedule, profile))


def peak_memory(plan: Plan, schedule: Schedule, profile: Profile) -> tuple[DeviceMemory, ...]:
    """The same, by what it holds.

    Raises:
        ProfileError: The profile lacks a component of the plan.
        SpecError: The profile's graph lacks one.
    """
    frozen = sum(
        layer.param_bytes
        for component in profile.graph.frozen
        for layer in profile.component(component.name).layers
    )
    profiles = device_profiles(plan, profile)
    sizes = split_sizes(plan.batch_size * plan.num_devices, plan.num_microbatches)
    found = []
    for device, order in enumerate(schedule.orders):
        stages = [plan.stages[index] for index in plan.stages_on(device)]
        trained = sum(profile.trained_bytes(s.backbone, s.start, s.stop) for s in stages)
        found.append(
            DeviceMemory(
                weights_bytes=sum(
                    layer.param_bytes
                    for s in stages
                    for layer in profile.component(s.backbone).layers[s.start : s.stop]
                ),
                frozen_bytes=frozen,
                gradient_bytes=trained,
                optimizer_bytes=MOMENTS_PER_WEIGHT * trained,
                activation_bytes=_peak_in_flight(plan, profiles[device], device, order, sizes),
            )
        )
    return tuple(found)


def _peak_in_flight(
    plan: Plan, profile: Profile, device: int, order: Sequence[Op], sizes: Sequence[int]
) -> int:
    """Peak of the activations between each forward and the end of its backward.

    A replica of a stage holds those of its share of each micro-batch.
    """
    live = peak = 0
    kept: dict[tuple[int, int], int] = {}
    last = {(op.stage, op.microbatch): op for op in order if op.kind is not OpKind.S}
    for op in order:
        key = (op.stage, op.microbatch)
        first, last_row = plan.stages[op.stage].rows_on(device, sizes[op.microbatch])
        samples = last_row - first
        recompute = plan.stages[op.stage].recompute
        added = 0
        if op.kind is OpKind.F and recompute:
            added = _input_bytes(plan, profile, op.stage, samples)
        elif op.kind is OpKind.F or (op.kind in (OpKind.B, OpKind.I) and recompute):
            added = _activation_bytes(plan, profile, op.stage, samples)
        kept[key] = kept.get(key, 0) + added
        live += added
        peak = max(peak, live)
        if op == last.get(key):
            live -= kept.pop(key)
    return peak


def _activation_bytes(plan: Plan, profile: Profile, index: int, samples: int) -> int:
    stage = plan.stages[index]
    cost = profile.component(stage.backbone)
    layers = cost.layers[stage.start : stage.stop]
    return sum(interpolate(cost.samples, layer.activation_bytes, samples) for layer in layers)


def _input_bytes(plan: Plan, profile: Profile, index: int, samples: int) -> int:
    values = profile.graph.values
    reads = stage_reads(profile.graph, plan.stages, index)
    return samples * sum(values[v].bytes_per_sample for v in reads)

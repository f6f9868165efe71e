"""What else one could run: DDP, ZeRO-1, unfilled pipelines and DiffusionPipe's own plan, predicted.

In:     a plan and the profile it was made of, and the network of the cluster if there is one.
Out:    an `Alternative` each, the plan itself first, all from the same simulator: the expected
        iteration over steps with and without self-conditioning, and memory.

DDP encodes first, splits its batch only if memory asks for it, and reduces its gradients after
the last backward, or in buckets under it. ZeRO-1 (Rajbhandari et al., arXiv 1910.02054, section
5.1) reduces in buckets to the owner of each slice, which moves half the bytes, steps 1/N of the
optimizer, and gathers the new weights when all are done; its optimizer state is 1/N.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_dpipe.core.errors import PlanError, UnsupportedError
from lightning_dpipe.core.plan import Plan, Stage, default_groups
from lightning_dpipe.core.profile import ComponentCost, Profile
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.planning.auto import Network
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.paper import paper_plan
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.variants import SELF_CONDITIONING, expected_us, variants_of
from lightning_dpipe.simulation.memory import MOMENTS_PER_WEIGHT, peak_bytes
from lightning_dpipe.simulation.simulate import simulate

BUCKET_BYTES = 25 * 2**20
"""torch's DistributedDataParallel: `bucket_cap_mb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to train, as predicted.

    `sync_us` is the gradient sum that a device waits for, `fits` whether memory holds it (None:
    the memory is unknown), `detail` how it cuts the batch.
    """

    name: str
    label: str
    detail: str
    num_stages: int
    iteration_us: float
    samples_per_s: float
    peak_bytes: int
    fits: bool | None
    sync_us: int


def compare(
    plan: Plan,
    profile: Profile,
    *,
    network: Network | None = None,
    probability: float = SELF_CONDITIONING,
) -> tuple[Alternative, ...]:
    """The plan, then everything it is measured against.

    Baselines take devices to be alike: of several kinds, all of them wait for the slowest.

    Args:
        plan: The plan.
        profile: What it was made of, before `network` changed its links.
        network: See `auto.Space`.
        probability: Share of self-conditioned steps, if the model has them.
    """
    if not profile.kinds:
        return tuple(_Judge(plan, profile, network, probability).all())
    ours = tuple(_Judge(plan, profile, network, probability).ours())
    kinds = map(profile.of_kind, range(1 + len(profile.others)))
    slowest = max(kinds, key=lambda kind: least_work_us(kind, plan.batch_size))
    return ours + tuple(_Judge(plan, slowest, network, probability).others())


def least_work_us(
    profile: Profile, batch_size: int, *, num_devices: int = 1, probability: float = 0.0
) -> float:
    """Least time of a device's share of the batch: each layer at the size with the best rate.

    Frozen layers see a local batch at most, trained ones that of a pipeline of `num_devices`.
    Devices of several kinds have shares with which all end together: the harmonic mean of theirs.
    """
    if profile.kinds:
        alone = (
            least_work_us(
                profile.on(r), batch_size, num_devices=num_devices, probability=probability
            )
            for r in range(len(profile.kinds))
        )
        return len(profile.kinds) / sum(1 / max(us, 1e-9) for us in alone)
    graph = profile.graph
    conditioned = sum(share for on, share in variants_of(graph, probability) if on)
    trained_us = 0.0
    for backbone in graph.backbones:
        again = conditioned if graph.feedback and graph.feedback.backbone == backbone.name else 0
        for layer in range(len(backbone.layers)):
            trained_us += min(
                (
                    (1 + again) * profile.forward_us(backbone.name, layer, layer + 1, n)
                    + profile.backward_us(backbone.name, layer, layer + 1, n)
                )
                * batch_size
                / n
                for n in range(1, batch_size * num_devices + 1)
            )
    return FrozenCosts.of(profile, samples=batch_size).least_us + trained_us


def useful_ratio(
    plan: Plan, profile: Profile, iteration_us: float, probability: float = 0.0
) -> float:
    """Least full-batch work / (devices x iteration): what counts of the device time."""
    least_us = least_work_us(
        profile, plan.batch_size, num_devices=plan.num_devices, probability=probability
    )
    return least_us / max(iteration_us, 1)


def buckets_of(profile: Profile, backbone: str, bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """Layer ranges whose gradients fill a bucket, gathered from the last layer on, as DDP does."""
    layers = profile.component(backbone).layers
    borders, held = [len(layers)], 0
    for i in range(len(layers) - 1, 0, -1):
        held += layers[i].trained_bytes
        if held >= bucket_bytes:
            borders.append(i)
            held = 0
    return tuple(pairwise([0, *reversed(borders)]))


class _Judge:
    """Predicts each alternative for one world, batch and model."""

    def __init__(
        self, plan: Plan, profile: Profile, network: Network | None, probability: float
    ) -> None:
        self.plan, self.profile, self.network = plan, profile, network
        self.probability = probability
        self.backbones = tuple(c.name for c in profile.graph.backbones)
        self.world_size, self.batch_size = plan.world_size, plan.batch_size

    def all(self) -> Iterator[Alternative]:
        yield from self.ours()
        yield from self.others()

    def ours(self) -> Iterator[Alternative]:
        plan = self.plan
        yield self._planned("plan", "this plan", plan)
        if plan.fills:
            yield self._planned("plan_unfilled", "this plan, unfilled", replace(plan, fills=()))

    def others(self) -> Iterator[Alternative]:
        for name, label, fill in (
            ("pipeline_unfilled", "1F1B, unfilled", False),
            ("paper", "DiffusionPipe's planner", True),
        ):
            found = self._paper(fill)
            if found is not None:
                yield self._planned(name, label, found)
        yield self._ddp("ddp", "DDP, sum after backward", self._data_parallel(None))
        bucketed = self._data_parallel(BUCKET_BYTES)
        yield self._ddp("ddp_overlapped", "DDP, overlapped buckets", bucketed)
        yield self._zero1()

    def _seen(self, num_devices: int) -> Profile:
        return self.profile if self.network is None else self.network(self.profile, num_devices)

    def _paper(self, fill: bool) -> Plan | None:
        """DiffusionPipe's plan of two stages or more; None where the world or model has none."""
        try:
            return paper_plan(
                self.profile,
                world_size=self.world_size,
                batch_size=self.batch_size,
                probability=self.probability,
                fill=fill,
                network=self.network,
            ).plan
        except (PlanError, UnsupportedError):
            return None  # a prime world, stages that do not fit, several backbones: no such row

    def _planned(self, name: str, label: str, plan: Plan) -> Alternative:
        seen = self.profile if self.network is None else self.network.placed(self.profile, plan)
        stages = len(plan.stages) // len(plan.chains)
        detail = f"{stages} stages x {plan.world_size // stages}"
        if plan.num_devices == 1:
            detail = f"{self.world_size} replicas"
        if plan.num_microbatches > 1:
            detail += f", {plan.num_microbatches} micro-batches"
        return self._alternative(name, label, detail, plan, seen)

    def _ddp(self, name: str, label: str, plan: Plan) -> Alternative:
        times = f", batch in {plan.num_microbatches}" if plan.num_microbatches > 1 else ""
        detail = f"{self.world_size} replicas{times}"
        return self._alternative(name, label, detail, plan, self._seen(1))

    def _data_parallel(self, bucket_bytes: int | None, saved_bytes: int = 0) -> Plan:
        """A whole model on each device; the batch in as few parts as memory allows."""
        profile = self._seen(1)
        stages = []
        for name in self.backbones:
            ranges: tuple[tuple[int, int], ...] = ((0, len(profile.component(name).layers)),)
            if bucket_bytes is not None:
                ranges = buckets_of(profile, name, bucket_bytes)
            stages += [
                Stage(backbone=name, start=start, stop=stop, devices=(0,)) for start, stop in ranges
            ]
        plan = Plan(
            graph_digest=self.plan.graph_digest,
            profile_digest=self.plan.profile_digest,
            groups=default_groups(self.world_size, 1),
            stages=tuple(stages),
            num_microbatches=1,
            batch_size=self.batch_size,
            schedule="1f1b",
            conditioned=self.plan.conditioned,
        )
        for microbatches in range(1, self.batch_size + 1):
            plan = replace(plan, num_microbatches=microbatches)
            if self._fits(_peak(plan, profile) - saved_bytes) is not False:
                break
        return plan

    def _zero1(self) -> Alternative:
        """On overlapped buckets: half the bytes, 1/N of the optimizer, then the weights' gather."""
        profile, n = self._seen(1), self.world_size
        trained = sum(
            layer.trained_bytes
            for name in self.backbones
            for layer in profile.component(name).layers
        )
        saved = MOMENTS_PER_WEIGHT * (trained - -(-trained // n))
        plan = self._data_parallel(BUCKET_BYTES, saved)
        ring = profile.allreduce
        scattering = replace(
            profile,
            allreduce=replace(ring, bytes_per_s=2 * ring.bytes_per_s),
            costs=tuple(_stepping_a_share(cost, n) for cost in profile.costs),
        )
        gather_us = ring.transfer_us(-(-(n - 1) * trained // n))
        base = self._ddp("zero1", "ZeRO-1", plan)
        made = self._alternative(base.name, base.label, base.detail, plan, scattering)
        iteration_us = made.iteration_us + gather_us
        peak = made.peak_bytes - saved
        return replace(
            made,
            iteration_us=iteration_us,
            samples_per_s=self._samples_per_s(iteration_us),
            sync_us=made.sync_us + gather_us,
            peak_bytes=peak,
            fits=self._fits(peak),
        )

    def _alternative(
        self, name: str, label: str, detail: str, plan: Plan, seen: Profile
    ) -> Alternative:
        iteration_us = expected_us(plan, seen, self.probability)
        timeline = simulate(plan, schedule_of(plan), seen)
        peak = _peak(plan, seen)
        return Alternative(
            name=name,
            label=label,
            detail=detail,
            num_stages=len(plan.stages) // len(plan.chains) if plan.num_devices > 1 else 1,
            iteration_us=iteration_us,
            samples_per_s=self._samples_per_s(iteration_us),
            peak_bytes=peak,
            fits=self._fits(peak),
            sync_us=timeline.total_us(Activity.SYNC) // timeline.num_devices,
        )

    def _samples_per_s(self, iteration_us: float) -> float:
        return self.batch_size * self.world_size * 1e6 / max(iteration_us, 1)

    def _fits(self, num_bytes: int) -> bool | None:
        room = self.profile.memory_bytes
        return None if room is None else num_bytes <= room


def _stepping_a_share(cost: ComponentCost, parts: int) -> ComponentCost:
    layers = tuple(replace(x, optimizer_us=-(-x.optimizer_us // parts)) for x in cost.layers)
    return replace(cost, layers=layers)


def _peak(plan: Plan, profile: Profile) -> int:
    return max(peak_bytes(plan, schedule_of(plan), profile))

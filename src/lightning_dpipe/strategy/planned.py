"""From a module on its device to the plan all ranks agree on, before anything is cut.

In:     a whole DiffusionModule, the world, the batch per device, and what the user fixed.
Out:    a `Built`: graph, binding, plan and (unless the user gave a plan) the profile behind it.

Every rank measures side by side, so that the times contain the contention of training; rank 0 makes
the plan, which is broadcast: from its own profile, or where devices are of several kinds from the
profile of the first rank of each (`strategy.devices`).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import DPipeError, PlanError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest, from_data, load, to_data
from lightning_dpipe.core.plan import Plan, default_groups
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.buckets import trace_buckets
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.planning.auto import Space
from lightning_dpipe.planning.matching import (
    check_model,
    check_profile,
    check_profile_of,
    check_run,
)
from lightning_dpipe.planning.opposite import Cuts, num_stages_of
from lightning_dpipe.planning.rows import row_range
from lightning_dpipe.planning.schedules import build_schedule
from lightning_dpipe.planning.search import (
    MEASURED_MARGIN,
    MICROBATCHES_PER_STAGE,
    Auto,
    check_given,
    make_plan,
    space_of,
    with_fills,
)
from lightning_dpipe.profiling.links import measure_links
from lightning_dpipe.profiling.store import (
    covering_samples,
    default_samples,
    device_name,
    profile_model,
    tool_versions,
)
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.devices import (
    check_device_kinds,
    devices_differ,
    own_cache,
    widened,
    world_profile,
)
from lightning_dpipe.strategy.patience import patient

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user fixed; None leaves it to a rule, "auto" to the search. A plan decides all."""

    num_stages: int | Auto | None = None
    num_microbatches: int | Auto | None = None
    schedule: str = "1f1b"
    plan: Plan | Path | None = None
    profile: Profile | Path | None = None
    cuts: Cuts | None = None
    budget_s: float = 60.0
    device_kinds: str = "name"
    replan_every_n_steps: int | None = None

    def check(self, world_size: int) -> None:
        """Refuse what no model could make right; needs neither model nor messages.

        Raises:
            PlanError: Stages and world, or plan and world, do not fit, or numbers are none.
            ScheduleError: The schedule is unknown.
        """
        check_device_kinds(self.device_kinds)
        every = self.replan_every_n_steps
        if every is not None and (not isinstance(every, int) or every < 1):
            raise PlanError(
                f"replan_every_n_steps={every!r}; give a whole number of at least 1, or leave it "
                "out"
            )
        if self.plan is not None:
            plan = self.read_plan()
            if plan.world_size != world_size:
                raise PlanError(
                    f"the plan is for {plan.world_size} ranks, this run has {world_size}; plan "
                    f"again, or run on {plan.world_size}"
                )
            return
        check_given(
            num_stages=self.num_stages, num_microbatches=self.num_microbatches, cuts=self.cuts
        )
        if self.searches:
            self.space(world_size)
        stages = self.stages(world_size)
        default_groups(world_size, 1 if stages is None else stages)
        microbatches = self.num_microbatches
        if not isinstance(microbatches, int):
            microbatches = MICROBATCHES_PER_STAGE * (stages or 1)
        build_schedule(self.schedule, num_stages=stages or 1, num_microbatches=microbatches or 1)

    @property
    def replans(self) -> bool:
        """Whether bubbles are filled anew in mid-run."""
        return self.replan_every_n_steps is not None

    @property
    def searches(self) -> bool:
        """Whether anything is left to the search."""
        return "auto" in (self.num_stages, self.num_microbatches)

    def space(self, world_size: int) -> Space:
        """What the search may choose from."""
        return space_of(self.num_stages, self.num_microbatches, world_size, self.cuts)

    def stages(self, world_size: int) -> int | None:
        """Devices of one pipeline; None if they are searched for."""
        if self.num_stages == "auto":
            return None
        if self.num_stages is not None:
            return self.num_stages
        return world_size if self.cuts is None else num_stages_of(self.cuts)

    def read_plan(self) -> Plan:
        """The user's plan."""
        assert self.plan is not None
        return self.plan if isinstance(self.plan, Plan) else load(Plan, self.plan)

    def read_profile(self) -> Profile | None:
        """The user's profile, if any."""
        return load(Profile, self.profile) if isinstance(self.profile, Path) else self.profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where the model will run; `training` says whether the batch is the one to train with."""

    world_size: int
    batch_size: int
    device: torch.device
    precision: str
    autocast: torch.dtype | None
    fill: bool
    training: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model as planned. `profile` is None when the user gave a plan that needs no fills.

    `buckets` and `bucket_profiles` are the graphs and profiles of the shape classes beside the
    base, the latter only where there are fills to plan.
    """

    graph: ModelGraph
    binding: Binding
    plan: Plan
    profile: Profile | None
    buckets: Mapping[str, ModelGraph] = field(default_factory=dict)
    bucket_profiles: Mapping[str, Profile] = field(default_factory=dict)


def build(spec: PipelineSpec, options: PlanOptions, setting: Setting, link: HostLink) -> Built:
    """Trace, measure and plan. Collective; raises the same error on all ranks.

    Raises:
        SpecError: The spec is inconsistent.
        PlanError: The plan does not fit model, batch or world.
    """
    error: Exception | None = None
    try:
        graphs = trace_buckets(spec, autocast=setting.autocast, device=setting.device)
        graph = graphs[BASE]
        binding = bind(spec, graph)
        check_batch(options, setting)
    except DPipeError as caught:
        error = caught
    link.raise_together(error)
    link.compare("the model's graph", digest(graphs if spec.shapes else graph))
    profiles: dict[str, Profile] = {}
    fills_pairs = setting.fill and bool(spec.shapes)
    wanted = fills_pairs or options.replans
    if options.plan is None or (setting.fill and (wanted or not options.read_plan().fills)):
        measured = graphs if fills_pairs else {BASE: graph}
        profiles = _profiles(spec, measured, binding, options, setting, link)
        profiles = {n: _of_world(p, options, setting, link) for n, p in profiles.items()}
    box: tuple[object, object] | None = None
    try:
        if link.rank == 0:
            plan = _plan(spec, graph, profiles.get(BASE), options, setting)
            box = (to_data(plan), to_data(profiles))
    except DPipeError as caught:
        error = caught
    link.raise_together(error)
    box = link.broadcast_object(box)
    assert box is not None
    plan = from_data(Plan, box[0])
    profiles = from_data(Mapping[str, Profile], box[1])
    link.compare("the plan", digest(plan))
    return Built(
        graph=graph,
        binding=binding,
        plan=plan,
        profile=profiles.pop(BASE, None),
        buckets={name: other for name, other in graphs.items() if name != BASE},
        bucket_profiles=profiles,
    )


def refit(built: Built, setting: Setting) -> Built:
    """The same cut for another run: with or without fills, for another batch size."""
    group_batch = setting.batch_size * built.plan.num_devices
    plan = replace(
        built.plan,
        batch_size=setting.batch_size,
        num_microbatches=min(built.plan.num_microbatches, group_batch),
        fills=(),
    )
    if setting.fill and built.profile is not None:
        plan = with_fills(plan, built.profile)
    return replace(built, plan=plan)


def check_batch(options: PlanOptions, setting: Setting) -> None:
    """Refuse more micro-batches than a pipeline's batch has samples.

    Raises:
        PlanError: Both numbers are named.
    """
    if options.plan is not None:
        plan = options.read_plan()
        microbatches, devices = plan.num_microbatches, plan.num_devices
    elif isinstance(options.num_microbatches, int):
        microbatches = options.num_microbatches
        devices = options.stages(setting.world_size) or setting.world_size
    else:
        return
    if microbatches < 1:
        raise PlanError(f"num_microbatches={microbatches}; give at least 1, or leave it out")
    if microbatches > setting.batch_size * devices:
        raise PlanError(
            f"num_microbatches={microbatches}, but a pipeline's batch has "
            f"{setting.batch_size * devices} samples ({setting.batch_size} per device x {devices} "
            "devices); use fewer micro-batches or a larger batch"
        )


def sizes_to_measure(
    graph: ModelGraph, options: PlanOptions, setting: Setting
) -> dict[str, tuple[int, ...]]:
    """Local batch sizes by component that every plan the options allow is made of."""
    if options.plan is None and options.searches:
        fewest, most = row_range(
            options.space(setting.world_size),
            world_size=setting.world_size,
            batch_size=setting.batch_size,
        )
        return covering_samples(
            graph, batch_size=setting.batch_size, fewest_rows=fewest, most_rows=most
        )
    if options.plan is not None:
        known = options.read_plan()
        devices, microbatches = known.num_devices, known.num_microbatches
    else:
        devices = options.stages(setting.world_size) or 1
        microbatches = MICROBATCHES_PER_STAGE * devices
        if isinstance(options.num_microbatches, int):
            microbatches = options.num_microbatches
    return default_samples(
        graph,
        batch_size=setting.batch_size,
        num_devices=devices,
        num_microbatches=microbatches,
    )


def _profiles(
    spec: PipelineSpec,
    graphs: Mapping[str, ModelGraph],
    binding: Binding,
    options: PlanOptions,
    setting: Setting,
    link: HostLink,
) -> dict[str, Profile]:
    """One profile per shape class, the base's as the user gave it, if so."""
    base = graphs[BASE]
    given = options.read_profile()
    if given is not None:
        check_profile_of(given, base)
    missing = {name: g for name, g in graphs.items() if given is None or name != BASE}
    if not missing:
        assert given is not None
        return {BASE: given}
    differ = devices_differ(setting.device, options.device_kinds, link)
    links = None
    if link.world_size > 1:
        transport = DistTransport(setting.device)
        links = measure_links(transport, setting.device)
        transport.close()
    progress = _announce()
    found = {} if given is None else {BASE: given}
    for name, graph in missing.items():
        samples = sizes_to_measure(graph, options, setting)
        found[name] = profile_model(
            spec,
            graph,
            binding,
            samples=widened(samples, setting.batch_size) if differ else samples,
            device=setting.device,
            dtype=setting.precision,
            autocast=setting.autocast,
            links=links,
            cache_dir=own_cache(options.device_kinds, link),
            budget_s=options.budget_s / len(missing),
            progress=progress,
        )
    return found


def _of_world(profile: Profile, options: PlanOptions, setting: Setting, link: HostLink) -> Profile:
    """With the other kinds of devices, unless the user chose the profile or who does what."""
    chosen = (options.profile, options.plan, options.cuts) != (None, None, None)
    if chosen or link.world_size != setting.world_size:
        return profile
    return world_profile(profile, options.device_kinds, link)


def _announce() -> Callable[[str], None]:
    """Say once that layers are measured; nothing is said when the profile is known already."""
    said = False

    def once(_: str) -> None:
        nonlocal said
        if not said:
            log.info("measuring the model's layers (kept for the next run)")
        said = True

    return once


def _plan(
    spec: PipelineSpec,
    graph: ModelGraph,
    profile: Profile | None,
    options: PlanOptions,
    setting: Setting,
) -> Plan:
    """Rank 0's plan."""
    if options.plan is None:
        assert profile is not None
        conditioning = spec.self_conditioning
        return make_plan(
            profile,
            world_size=setting.world_size,
            batch_size=setting.batch_size,
            num_stages=options.num_stages,
            num_microbatches=options.num_microbatches,
            margin=0.0 if profile.estimated else MEASURED_MARGIN,
            schedule=options.schedule,
            fill=setting.fill,
            cuts=options.cuts,
            probability=0.0 if conditioning is None else conditioning.probability,
            progress=patient(log.info),
        )
    plan = options.read_plan()
    check_model(plan, graph)
    if options.profile is not None and profile is not None:
        check_profile(plan, profile)
    check_run(
        plan,
        device=device_name(setting.device),
        dtype=setting.precision,
        versions=tool_versions(),
        batch_size=setting.batch_size if setting.training else None,
    )
    if not setting.fill:
        return replace(plan, fills=(), batch_size=setting.batch_size)
    return plan if plan.fills or profile is None else with_fills(plan, profile)

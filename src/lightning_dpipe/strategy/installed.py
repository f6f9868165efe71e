"""A module installed on its ranks: planned, cut, and connected to its peers.

In:     a DiffusionModule on its device, the user's options, the world.
Out:    session and step runner. A module that an earlier run of this process has cut keeps its
        cut; only fills and batch size follow the new run.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models.binding import bind
from lightning_dpipe.planning.explain import explain
from lightning_dpipe.planning.matching import check_batch_of
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.runtime.reduce import Reducer
from lightning_dpipe.strategy.assemble import PipelineSession, cut
from lightning_dpipe.strategy.checkpoint import broadcast_weights
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.pair_fills import PairFills
from lightning_dpipe.strategy.planned import Built, PlanOptions, Setting, build, refit
from lightning_dpipe.strategy.steps import StepRunner

log = logging.getLogger(__name__)

MakeReducer = Callable[[Sequence[Sequence[int]]], Reducer | None]
MakeRunner = Callable[[DiffusionModule, PipelineSession], StepRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What a strategy runs steps with. `replicas` are the ranks with the same stages, if any."""

    built: Built
    session: PipelineSession
    runner: StepRunner
    replicas: Any
    weights: tuple[int, ...]

    @classmethod
    def of(
        cls,
        module: DiffusionModule,
        options: PlanOptions,
        setting: Setting,
        link: HostLink,
        make_reducer: MakeReducer,
        make_runner: MakeRunner,
    ) -> "Installation":
        """Install a module, or adapt its installation to another run. Collective."""
        old = _INSTALLED.get(module)
        if old is not None and old.weights == _weights(module):
            built = _checked(refit(old.built, setting), options, setting)
            if digest(built.plan) == digest(old.built.plan):
                old.session.forget()
                return cls._keep(module, old, built, old.session, make_runner)
            session = _session(module, built, setting, link, old.session._reducer)
            return cls._keep(module, old, built, session, make_runner)
        later = module.later
        if any(p.is_meta for p in module.parameters()) and not (
            later is not None and later.explains(module.parameters())
        ):
            raise UnsupportedError(
                f"{type(module).__name__} has weights on meta that no earlier run of this process "
                "explains; build a new module and load a checkpoint into it"
            )
        broadcast_weights(module, link)
        built = build(module.spec, options, setting, link)
        cut(module, built.binding, built.plan, built.plan.locate(link.rank)[1])
        if later is not None:
            later.fill(module.parameters(), setting.device)
            module.later = None
        # Bound anew: the old binding holds the weights that were cut off.
        built = replace(built, binding=bind(module.spec, built.graph))
        session = _session(module, built, setting, link, make_reducer(built.plan.replica_sets))
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        if link.rank == 0 and built.profile is not None:
            log.info("plan\n%s", explain(built.plan, built.profile))
        new = cls(
            built=built,
            session=session,
            runner=make_runner(module, session),
            replicas=_replica_group(built, link),
            weights=_weights(module),
        )
        _INSTALLED[module] = new
        return new

    def refilled(self, module: DiffusionModule, plan: Plan, profile: Profile) -> "Installation":
        """The same with other fills, from the next step on."""
        self.session.refill(plan)
        new = replace(self, built=replace(self.built, plan=plan, profile=profile))
        _INSTALLED[module] = new
        return new

    @classmethod
    def _keep(
        cls,
        module: DiffusionModule,
        old: "Installation",
        built: Built,
        session: PipelineSession,
        make_runner: MakeRunner,
    ) -> "Installation":
        new = cls(
            built=built,
            session=session,
            runner=make_runner(module, session),
            replicas=old.replicas,
            weights=old.weights,
        )
        _INSTALLED[module] = new
        return new


_INSTALLED: "WeakKeyDictionary[DiffusionModule, Installation]" = WeakKeyDictionary()


def _session(
    module: DiffusionModule,
    built: Built,
    setting: Setting,
    link: HostLink,
    reducer: Reducer | None,
) -> PipelineSession:
    fills = None
    if built.bucket_profiles and built.profile is not None and setting.fill:
        fills = PairFills(built.plan, {BASE: built.profile, **built.bucket_profiles}, link)
    return PipelineSession(
        graph=built.graph,
        binding=built.binding,
        plan=built.plan,
        rank=link.rank,
        transport=DistTransport(setting.device),
        device=setting.device,
        seed=module.seed,
        reducer=reducer,
        buckets=built.buckets,
        fills=fills,
    )


def _checked(built: Built, options: PlanOptions, setting: Setting) -> Built:
    """Refuse options that ask for another cut than the one the module has, or another batch.

    Raises:
        UnsupportedError: Both numbers of stages are named.
        PlanError: The user's plan is for another batch.
    """
    if options.plan is not None and setting.training:
        check_batch_of(options.read_plan(), setting.batch_size)
    stages = options.stages(setting.world_size) if options.plan is None else None
    mixed = built.profile is not None and built.profile.kinds
    cut_into = len(built.plan.stages) if mixed else built.plan.num_devices
    if stages is not None and stages != cut_into:
        raise UnsupportedError(
            f"the module was cut for {cut_into} stages by an earlier run of this "
            f"process, now {stages} are asked for; build a new module and load a checkpoint into it"
        )
    return built


def _weights(module: DiffusionModule) -> tuple[int, ...]:
    """Identity of the weights: a module that rebuilt itself needs a new cut."""
    return tuple(id(p) for p in module.parameters())


def _replica_group(built: Built, link: HostLink) -> Any:
    """Process group of the ranks with this one's stages; None if no other rank has them."""
    mine = None
    for ranks in built.plan.replica_sets:
        if len(ranks) > 1:
            group = dist.new_group(sorted(ranks))
            mine = group if link.rank in ranks else mine
    return mine

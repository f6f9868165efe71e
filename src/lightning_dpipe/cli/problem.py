"""What ``dpipe plan`` plans for: this machine, a cluster that is not here, or a ready profile.

In: a composed config. Out: a `Problem`: profile, links, world, batch, and what is left to search.

With ``cluster=`` the model is built without weights and its costs are estimated (roofline), or a
ready profile of the cluster's device is taken; with ``profile=`` alone no model is built at all.
In both cases stages and micro-batches that nobody gave are searched for.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf

from lightning_dpipe.cli.on_meta import meta_spec
from lightning_dpipe.cli.parts import build_strategy, num_devices
from lightning_dpipe.cli.paths import config_dir
from lightning_dpipe.cli.planned import Planned, fills_bubbles
from lightning_dpipe.core.cluster import Cluster
from lightning_dpipe.core.errors import ClusterError, DPipeError, ProfileError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import load
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.planning.auto import Network
from lightning_dpipe.planning.matching import check_profile_of
from lightning_dpipe.planning.network import network_of
from lightning_dpipe.planning.variants import SELF_CONDITIONING
from lightning_dpipe.profiling.roofline import count_model, roofline_profile
from lightning_dpipe.strategy.planned import PlanOptions, Setting, sizes_to_measure
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy

log = logging.getLogger(__name__)

_DTYPES = {"32-true": "float32", "bf16-mixed": "bfloat16", "16-mixed": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a plan is made of. `network` is None where the profile's links hold for all."""

    profile: Profile
    network: Network | None
    options: PlanOptions
    world_size: int
    batch_size: int
    fill: bool
    probability: float
    place: str


def elsewhere(config: DictConfig) -> bool:
    """Whether the plan is for something that is not this machine."""
    return bool(config.get("cluster")) or config.profile is not None


def problem_here(planned: Planned) -> Problem:
    """The problem of a model that was measured on this machine."""
    profile, conditioning = planned.built.profile, planned.module.spec.self_conditioning
    assert profile is not None, "a plan that is made here has a profile"
    return Problem(
        profile=profile,
        network=None,
        options=planned.options,
        world_size=planned.setting.world_size,
        batch_size=planned.setting.batch_size,
        fill=planned.setting.fill,
        probability=SELF_CONDITIONING if conditioning is None else conditioning.probability,
        place=f"{planned.setting.world_size} x {profile.device}",
    )


def problem_elsewhere(config: DictConfig) -> Problem:
    """The problem of a cluster or of a ready profile.

    Raises:
        ClusterError: The cluster lacks a figure or has fewer devices than asked for.
        ProfileError: The profile is of another device, or precision has no estimate.
        PlanError: Sizes do not fit each other.
        DPipeError: A size is nowhere given.
    """
    cluster = cluster_of(config)
    world_size = config.world_size or _devices(config) or (cluster.world_size if cluster else 0)
    if not world_size:
        raise DPipeError("a plan of a ready profile needs world_size=N (or trainer.devices=N)")
    if cluster is not None:
        cluster = shrunk(cluster, world_size)
    spec = None if OmegaConf.is_missing(config.model, "_target_") else meta_spec(config)
    ready = None if config.profile is None else ready_profile(str(config.profile))
    num_backbones = len(ready.graph.backbones) if ready else len(spec.backbones) if spec else 1
    options = searching(_options(config, world_size), num_backbones)
    setting = Setting(
        world_size=world_size,
        batch_size=_batch_size(config),
        device=torch.device("cpu"),
        precision=str(config.trainer.precision),
        autocast=None,
        fill=fills_bubbles(config),
    )
    profile = _profile(cluster, spec, ready, options, setting)
    conditioning = None if spec is None else spec.self_conditioning
    place = f"{world_size} x {profile.device}"
    if cluster is not None:
        place = (
            f"{cluster.name}: {cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
        )
    return Problem(
        profile=profile,
        network=None if cluster is None else network_of(cluster),
        options=options,
        world_size=world_size,
        batch_size=setting.batch_size,
        fill=setting.fill,
        probability=SELF_CONDITIONING if conditioning is None else conditioning.probability,
        place=place,
    )


def cluster_of(config: DictConfig) -> Cluster | None:
    """The cluster that the config chooses, if any."""
    if not config.get("cluster"):
        return None
    content = OmegaConf.to_container(config.cluster, resolve=True)
    assert isinstance(content, dict)
    return Cluster.from_mapping({str(key): value for key, value in content.items()})


def shrunk(cluster: Cluster, world_size: int) -> Cluster:
    """As much of a cluster as `world_size` devices are: whole nodes, or a part of one.

    Raises:
        ClusterError: It has fewer, or some nodes would be used in part.
    """
    each = cluster.devices_per_node
    if world_size > cluster.world_size:
        raise ClusterError(
            f"world_size={world_size}, but {cluster.name} has {cluster.world_size} devices "
            f"({cluster.nodes} nodes of {each}); use fewer, or set cluster.nodes"
        )
    if world_size > each and world_size % each:
        raise ClusterError(
            f"world_size={world_size} leaves a node of {cluster.name} in part unused "
            f"({each} devices a node); use a multiple of {each}, or at most {each}"
        )
    if world_size <= each:
        return replace(cluster, nodes=1, devices_per_node=world_size)
    return replace(cluster, nodes=world_size // each)


def estimate(
    spec: PipelineSpec, cluster: Cluster, options: PlanOptions, setting: Setting
) -> Profile:
    """Roofline profile at every size that the options' plans ask for.

    Raises:
        ProfileError: The precision has no estimate.
    """
    if setting.precision not in _DTYPES:
        raise ProfileError(
            f"trainer.precision={setting.precision} has no estimate; use one of "
            f"{', '.join(_DTYPES)}"
        )
    log.info("counting the model's work; nothing is computed")
    counted = count_model(spec, dtype=_DTYPES[setting.precision])
    samples = sizes_to_measure(counted.graph, options, setting)
    return roofline_profile(counted, cluster=cluster, samples=samples)


def _profile(
    cluster: Cluster | None,
    spec: PipelineSpec | None,
    profile: Profile | None,
    options: PlanOptions,
    setting: Setting,
) -> Profile:
    if profile is None:
        assert cluster is not None
        if spec is None:
            raise DPipeError(
                "nothing chooses the model; give recipe=NAME, model._target_= or profile=FILE"
            )
        return estimate(spec, cluster, options, setting)
    if cluster is not None:
        known = [profile.device, *(kind.device for kind in profile.others)]
        there = [cluster.device.name, *(device.name for device in cluster.others)]
        if known != there:
            raise ProfileError(
                f"the profile is of {', '.join(known)}, {cluster.name} has {', '.join(there)}; "
                "choose another cluster, or leave profile= out to estimate"
            )
    if spec is not None:
        check_profile_of(profile, _graph(spec, profile))
    return profile


def ready_profile(name: str) -> Profile:
    """A profile from a file, or one that ships with the package by its name.

    Raises:
        ProfileError: There is neither; those that ship are listed.
    """
    path = Path(to_absolute_path(name))
    shipped = {p.stem: p for p in sorted((config_dir() / "profiles").glob("*.json"))}
    if not path.is_file() and name in shipped:
        path = shipped[name]
    if not path.is_file():
        raise ProfileError(
            f"profile={name} is no file, nor one of those that ship: {', '.join(shipped)}"
        )
    return load(Profile, path)


def _graph(spec: PipelineSpec, profile: Profile) -> ModelGraph:
    """The model's graph in the profile's precision."""
    dtype = _DTYPES.get(profile.dtype, profile.dtype)
    return trace(spec, autocast=None if dtype == "float32" else getattr(torch, dtype, None))


def _options(config: DictConfig, world_size: int) -> PlanOptions:
    """What the user fixed."""
    strategy = build_strategy(config, world_size)
    if not isinstance(strategy, DiffusionPipeStrategy):
        raise DPipeError(
            f"strategy {type(strategy).__name__} has no plan; use strategy=diffusionpipe"
        )
    if strategy.options.profile is not None:
        raise DPipeError("strategy.profile is for training; use profile=FILE to plan from one")
    return strategy.options


def searching(options: PlanOptions, num_backbones: int) -> PlanOptions:
    """Options that leave to the search what nobody gave; it knows one backbone."""
    if options.cuts is not None or num_backbones > 1:
        return options
    stages, microbatches = options.num_stages, options.num_microbatches
    return replace(
        options,
        num_stages="auto" if stages is None else stages,
        num_microbatches="auto" if microbatches is None else microbatches,
    )


def _devices(config: DictConfig) -> int | None:
    """Ranks that the command line asks for; the default of trainer.devices asks for nothing."""
    overrides = [o.lstrip("+") for o in HydraConfig.get().overrides.task]
    if not any(o.startswith("trainer.devices=") for o in overrides):
        return None
    return num_devices(config) * int(config.trainer.num_nodes)


def _batch_size(config: DictConfig) -> int:
    size = config.batch_size or config.strategy.get("batch_size") or config.data.get("batch_size")
    if not isinstance(size, int):
        raise DPipeError("nothing tells the batch size; give batch_size=N (samples per device)")
    return size

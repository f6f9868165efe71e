"""Profiles on disk: measured once per model, sizes, device and versions.

In:     a model on its device. Out: its Profile, from the cache when nothing that matters changed.
The cache is `$XDG_CACHE_HOME/lightning-dpipe` or `~/.cache/lightning-dpipe`. Links belong to a
world rather than to a model, so those given always replace the stored ones.
"""

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.graph import ComponentKind, ModelGraph
from lightning_dpipe.core.jsonio import digest, load, save
from lightning_dpipe.core.plan import split_sizes
from lightning_dpipe.core.profile import Link, Profile
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.profiling.clock import Clock, Repeats
from lightning_dpipe.profiling.fills import measure_fill_us
from lightning_dpipe.profiling.layers import Progress, measure_layers
from lightning_dpipe.profiling.links import loopback_links
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.version import __version__

log = logging.getLogger(__name__)


def profile_model(
    spec: PipelineSpec,
    graph: ModelGraph,
    binding: Binding | None = None,
    *,
    samples: Mapping[str, Sequence[int]],
    device: torch.device,
    dtype: str,
    autocast: torch.dtype | None = None,
    cache_dir: Path | None = None,
    links: tuple[Link, Link] | None = None,
    repeats: Repeats | None = None,
    budget_s: float | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Read the model's profile from the cache, or measure and store it.

    Args:
        spec: The model; used to bind `graph` when `binding` is not given.
        graph: What `trace` made of it.
        binding: What `bind` made of it.
        samples: Component name -> local batch sizes (`default_samples`).
        device: Where the weights are.
        dtype: Name of the precision, part of the key.
        autocast: Mixed-precision dtype, None for none.
        cache_dir: Other place of the cache.
        links: (p2p, allreduce) of the world at hand; by default those of ranks on this host.
        repeats, budget_s, clock, progress: As in `measure_layers`.

    Raises:
        ProfileError: A component has no sizes, or weights are not on `device`.
    """
    binding = binding or bind(spec, graph)
    wanted = {name: sorted(set(sizes)) for name, sizes in samples.items()}
    versions = tool_versions()
    key = digest(
        {
            "graph": graph,
            "weights": _weights(binding),
            "samples": wanted,
            "device": device_name(device),
            "dtype": [dtype, str(autocast)],
            "measures": ["layers", "fills"],
            "versions": versions,
        }
    )
    path = (cache_dir or default_cache_dir()) / f"profile-{key}.json"
    profile = _read(path, graph)
    if profile is None:
        costs = measure_layers(
            binding,
            graph,
            samples=wanted,
            device=device,
            autocast=autocast,
            repeats=repeats,
            budget_s=budget_s,
            clock=clock,
            progress=progress,
        )
        p2p, allreduce = links or loopback_links()
        profile = Profile(
            graph=graph,
            costs=costs,
            p2p=p2p,
            allreduce=allreduce,
            device=device_name(device),
            dtype=dtype,
            fill_us=measure_fill_us(binding, graph, device=device, clock=clock),
            memory_bytes=_memory_bytes(device),
            versions=versions,
        )
        save(profile, path)
    return profile if links is None else replace(profile, p2p=links[0], allreduce=links[1])


def default_samples(
    graph: ModelGraph, *, batch_size: int, num_devices: int, num_microbatches: int
) -> dict[str, tuple[int, ...]]:
    """The sizes a plan is made of.

    Backbones run on micro-batches of the group's joint batch (of two sizes if it does not divide);
    frozen components on the local batch and, when they fill bubbles, on parts of it. One smaller
    size each tells fixed from proportional cost.
    """
    total = batch_size * num_devices
    parts = set(split_sizes(total, min(num_microbatches, total)))
    backbone = sorted(parts | {-(-max(parts) // 2)})
    frozen = sorted({-(-batch_size // n) for n in (1, 2, 4, 8)})
    return {
        c.name: tuple(frozen if c.kind is ComponentKind.FROZEN else backbone)
        for c in graph.components
    }


def covering_samples(
    graph: ModelGraph, *, batch_size: int, fewest_rows: int, most_rows: int
) -> dict[str, tuple[int, ...]]:
    """Sizes that enclose every row count a search may ask for, each at most twice the one before.

    Costs are close to linear between neighbours; beyond the ends nothing is guessed.
    """
    rows = {fewest_rows, most_rows, min(max(batch_size, fewest_rows), most_rows)}
    power = 1
    while power < most_rows:
        if power > fewest_rows:
            rows.add(power)
        power *= 2
    if len(rows) == 1:  # a second size tells fixed from proportional cost
        rows.add(-(-most_rows // 2))
    frozen = sorted({-(-batch_size // n) for n in (1, 2, 4, 8)})
    return {
        c.name: tuple(frozen if c.kind is ComponentKind.FROZEN else sorted(rows))
        for c in graph.components
    }


def default_cache_dir() -> Path:
    """Where profiles are kept unless told otherwise."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lightning-dpipe"


def device_name(device: torch.device) -> str:
    """Name of the hardware; on a CPU with the number of threads, which decides its speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{_cpu_model()}, {torch.get_num_threads()} threads"
    return device.type


def tool_versions() -> dict[str, str]:
    """Versions of everything that can change a layer's speed."""
    versions = {"lightning-dpipe": __version__, "torch": torch.__version__}
    for name in ("diffusers", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def _read(path: Path, graph: ModelGraph) -> Profile | None:
    """A stored profile, or None when there is none that can be used."""
    try:
        profile = load(Profile, path)
        fits = digest(profile.graph) == digest(graph)
    except FileNotFoundError:
        return None
    except (DPipeError, OSError) as error:
        log.warning("the stored profile %s cannot be read (%s); measuring again", path, error)
        return None
    if not fits:
        log.warning("the stored profile %s is of another model; measuring again", path)
        return None
    return profile


def _weights(binding: Binding) -> dict[str, list[list[str]]]:
    """What the graph does not say: classes, inner shapes, dtypes, frozen or not."""
    return {
        name: [
            [type(m).__name__ for m in layer.modules]
            + [f"{list(p.shape)} {p.dtype} {p.requires_grad}" for p in layer.parameters]
            for layer in layers
        ]
        for name, layers in binding.layers.items()
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total

"""``dpipe profile``: measure every layer of a recipe on this machine, or estimate it elsewhere.

In: a composed config; ``cluster=NAME`` estimates (roofline) instead of measuring. Out: the profile
as a file (``out=FILE``, else in the output folder) for ``dpipe plan profile=``, ``dpipe simulate``
and ``strategy.profile=``; a table by component. Sizes cover every plan that a search for
``world_size=`` devices may try.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from tqdm import tqdm

from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.planned import Prepared, prepare_config
from lightning_dpipe.cli.problem import problem_elsewhere, searching
from lightning_dpipe.core.jsonio import digest, save
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.profiling.store import profile_model
from lightning_dpipe.strategy.planned import sizes_to_measure


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Measure or estimate, save and show."""
    configure_console()
    if config.get("cluster"):
        profile = problem_elsewhere(config).profile
    else:
        profile = measured(prepare_config(config))
    folder = Path(HydraConfig.get().runtime.output_dir)
    path = folder / "profile.json" if config.out is None else Path(to_absolute_path(config.out))
    save(profile, path)
    print(table(profile))
    print(f"\nprofile   {path}  ({digest(profile)})")
    if "--json" in flags:
        print(json.dumps({"path": str(path), "digest": digest(profile), **totals(profile)}))


def measured(prepared: Prepared) -> Profile:
    """Measure with a progress bar, or read what an earlier run of the same sizes has measured."""
    spec, setting = prepared.module.spec, prepared.setting
    graph = trace(spec, autocast=setting.autocast, device=setting.device)
    options = searching(prepared.options, len(graph.backbones))
    samples = sizes_to_measure(graph, options, setting)
    with tqdm(total=1 + sum(map(len, samples.values())), unit="part", leave=False) as bar:

        def progress(text: str) -> None:
            bar.set_description(text)
            bar.update()

        return profile_model(
            spec,
            graph,
            bind(spec, graph),
            samples=samples,
            device=setting.device,
            dtype=setting.precision,
            autocast=setting.autocast,
            progress=progress,
        )


def totals(profile: Profile) -> dict[str, object]:
    """Device, precision, and each component's times at its largest size."""
    components = []
    for cost in profile.costs:
        most, count = cost.samples[-1], len(cost.layers)
        components.append(
            {
                "name": cost.name,
                "num_layers": count,
                "samples": list(cost.samples),
                "forward_us": profile.forward_us(cost.name, 0, count, most),
                "backward_us": profile.backward_us(cost.name, 0, count, most),
                "param_bytes": sum(layer.param_bytes for layer in cost.layers),
                "activation_bytes": sum(layer.activation_bytes[-1] for layer in cost.layers),
            }
        )
    return {
        "device": profile.device,
        "dtype": profile.dtype,
        "estimated": profile.estimated,
        "components": components,
    }


def table(profile: Profile) -> str:
    """One line a component, at its largest size."""
    how = "ESTIMATED (roofline), not measured" if profile.estimated else "measured"
    lines = [
        f"{profile.device}, {profile.dtype}; times are {how}",
        "",
        "component     layers  samples     forward     backward   parameters  activations  sizes",
    ]
    for cost in profile.costs:
        most, count = cost.samples[-1], len(cost.layers)
        lines.append(
            f"{cost.name:<14}{count:>6}{most:>9}"
            f"{profile.forward_us(cost.name, 0, count, most) / 1e3:>9.2f} ms"
            f"{profile.backward_us(cost.name, 0, count, most) / 1e3:>10.2f} ms"
            f"{sum(x.param_bytes for x in cost.layers) / 1e6:>10.2f} MB"
            f"{sum(x.activation_bytes[-1] for x in cost.layers) / 1e6:>10.2f} MB"
            f"  {', '.join(map(str, cost.samples))}"
        )
    return "\n".join(lines)

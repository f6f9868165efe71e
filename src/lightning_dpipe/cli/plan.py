"""``dpipe plan``: what a run will do, before it runs.

In: a composed config. Out: the stage table and the predicted timeline on the console; ``plan.json``
(for ``strategy.plan=``), ``profile.json``, ``timeline.png`` and ``timeline.trace.json`` (Perfetto)
in the output folder. With ``--json`` the last line is one JSON object.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dpipe.cli.planned import plan_config
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.jsonio import save
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.search import explain
from lightning_dpipe.simulation.render import ascii_chart, save_png, save_trace
from lightning_dpipe.strategy.callbacks.plan_artifact import predictions


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Plan as `config` says and show it.

    Raises:
        DPipeError: The config brings a plan of its own.
    """
    if config.strategy.get("plan") is not None:
        raise DPipeError("strategy.plan is given; `dpipe plan` makes a plan: leave it out")
    built = plan_config(config).built
    plan, profile = built.plan, built.profile
    assert profile is not None, "a plan that is made here has a profile"
    unfilled, filled = predictions(plan, profile)
    folder = Path(HydraConfig.get().runtime.output_dir)
    save(plan, folder / "plan.json")
    save(profile, folder / "profile.json")
    save_png(
        [unfilled, filled], folder / "timeline.png", "predicted\nfrozen work up front\nin bubbles"
    )
    save_trace([unfilled, filled], folder / "timeline.trace.json")
    print(explain(plan, profile))
    print(f"\n{ascii_chart(filled)}\n")
    print(f"plan      {folder / 'plan.json'}  (train with it: strategy.plan=...)")
    print(f"picture   {folder / 'timeline.png'}")
    print(f"trace     {folder / 'timeline.trace.json'}  (open in ui.perfetto.dev)")
    if "--json" in flags:
        print(json.dumps(figures(plan, unfilled, filled) | {"folder": str(folder)}))


def figures(plan: Plan, unfilled: Timeline, filled: Timeline) -> dict[str, Any]:
    """The numbers of a plan, flat."""
    samples = plan.batch_size * plan.world_size
    return {
        "world_size": plan.world_size,
        "num_stages": len(plan.stages),
        "num_replicas": len(plan.groups),
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
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

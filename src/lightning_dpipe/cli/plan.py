"""``dpipe plan``: what a run will do, before it runs, here or on machines one does not have.

In: a composed config; ``cluster=`` or ``profile=`` plan for other machines (`problem`). Out: the
report on the console; ``plan.json`` (for ``strategy.plan=``), ``profile.json``, ``timeline.png``
and ``timeline.trace.json`` (Perfetto) in the output folder. With ``--json`` the last line is one
JSON object with all of it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_dpipe.cli import report
from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.planned import plan_config
from lightning_dpipe.cli.problem import Problem, elsewhere, problem_elsewhere, problem_here
from lightning_dpipe.cli.solve import Solution, solve
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.jsonio import save
from lightning_dpipe.simulation.render import save_png, save_trace
from lightning_dpipe.strategy.patience import patient


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Plan as `config` says and show it.

    Raises:
        DPipeError: The config brings a plan of its own.
    """
    if config.strategy.get("plan") is not None:
        raise DPipeError("strategy.plan is given; `dpipe plan` makes a plan: leave it out")
    configure_console()
    progress = patient(lambda line: print(line, file=sys.stderr, flush=True))
    if elsewhere(config):
        problem = problem_elsewhere(config)
        solution = solve(problem, progress)
    else:
        planned = plan_config(config)
        problem = problem_here(planned)
        solution = solve(problem, progress, planned.built.plan)
    folder = Path(HydraConfig.get().runtime.output_dir)
    _save(solution, folder)
    print(report.text(solution, problem.place))
    print(f"\n{_files(problem, folder)}")
    if "--json" in flags:
        print(json.dumps(report.data(solution) | {"folder": str(folder)}))


def _save(solution: Solution, folder: Path) -> None:
    save(solution.plan, folder / "plan.json")
    save(solution.profile, folder / "profile.json")
    title = "estimated" if solution.profile.estimated else "predicted"
    both = [solution.unfilled, solution.filled]
    save_png(both, folder / "timeline.png", f"{title}\nfrozen work up front\nin bubbles")
    save_trace(both, folder / "timeline.trace.json")


def _files(problem: Problem, folder: Path) -> str:
    train = f"train with it: strategy.plan=... data.batch_size={problem.batch_size}"
    return (
        f"plan      {folder / 'plan.json'}  ({train})\n"
        f"profile   {folder / 'profile.json'}  (dpipe simulate PLAN PROFILE)\n"
        f"picture   {folder / 'timeline.png'}\n"
        f"trace     {folder / 'timeline.trace.json'}  (open in ui.perfetto.dev)"
    )

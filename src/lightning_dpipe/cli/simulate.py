"""``dpipe simulate PLAN PROFILE``: the predicted iteration of two files, without model or torch.

In: a plan.json and the profile.json it was made of; another pair is refused. Out: stages, memory,
traffic, the timeline as text and, with ``--png FILE``, as a picture; ``--json`` ends with one line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_dpipe.cli import report
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.core.jsonio import load, to_data
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.explain import limits, stage_table
from lightning_dpipe.planning.matching import check_profile
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.traffic import traffic
from lightning_dpipe.simulation.memory import peak_memory
from lightning_dpipe.simulation.render import ascii_chart, save_png
from lightning_dpipe.simulation.simulate import simulate


def run(arguments: Sequence[str]) -> int:
    """Predict and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dpipe simulate", description=__doc__.split("\n")[0])
    parser.add_argument("plan", type=Path, help="plan.json, made by dpipe plan or a training run")
    parser.add_argument("profile", type=Path, help="profile.json beside it")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--png", type=Path, metavar="FILE", help="where to draw the timelines")
    chosen = parser.parse_args(arguments)
    try:
        _predict(load(Plan, chosen.plan), load(Profile, chosen.profile), chosen)
    except (DPipeError, OSError) as error:
        print(f"dpipe: {error}", file=sys.stderr)
        return 2
    return 0


def _predict(plan: Plan, profile: Profile, chosen: argparse.Namespace) -> None:
    """Check that the two belong together, then print.

    Raises:
        PlanError: They do not; what differs is named.
    """
    check_profile(plan, profile)
    schedule = schedule_of(plan)
    unfilled = simulate(replace(plan, fills=()), schedule, profile)
    filled = simulate(plan, schedule, profile)
    memory, sent = peak_memory(plan, schedule, profile), traffic(plan, profile.graph)
    found = limits(plan, profile, unfilled, filled, memory)
    parts = [
        report.head(plan, profile, f"{plan.world_size} x {profile.device}"),
        stage_table(plan, profile),
        report.device_table(memory, sent, profile),
        report.prediction(unfilled, filled),
        ascii_chart(filled),
        f"What limits it:\n{report.limits_text(found)}",
    ]
    print("\n\n".join(parts))
    if chosen.png is not None:
        save_png([unfilled, filled], chosen.png, "predicted\nfrozen work up front\nin bubbles")
        print(f"\npicture   {chosen.png}")
    if chosen.json:
        data = report.figures(plan, unfilled, filled) | {
            "estimated": profile.estimated,
            "memory": [to_data(m) | {"total_bytes": m.total_bytes} for m in memory],
            "traffic": to_data(sent),
            "ledger_us": filled.ledger(),
            "limits": to_data(found),
        }
        print(json.dumps(data))

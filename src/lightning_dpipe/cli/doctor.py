"""``dpipe doctor``: check a data set on the CPU before a GPU is rented.

In: a composed config (``data=image_folder data.path=...``, or a recipe); the model is not built.
Out: faults by kind, with files and what training does about them; shape classes, batches, steps;
exit code 1 if training would refuse. With ``--json`` the last line is one JSON object that names
every file; ``--all`` names every file in the text.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_dpipe.cli.app import JobFailedError
from lightning_dpipe.cli.console import configure_console
from lightning_dpipe.cli.parts import build_data, num_devices
from lightning_dpipe.data.doctor import Report, examine
from lightning_dpipe.data.faults import Fault, Verdict, counted
from lightning_dpipe.data.inventory import Told

NUM_SHOWN = 3


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Examine and print.

    Raises:
        JobFailedError: Training would refuse.
        DPipeError: Nothing chooses the data, or it cannot be examined at all.
    """
    configure_console()
    report = examine(
        build_data(config),
        num_ranks=num_devices(config) * config.trainer.num_nodes,
        progress=lambda part: Told(f"looking at {part}", tell=_tell),
        needs_tokenizer=not OmegaConf.is_missing(config.model, "_target_"),
    )
    print("\n".join(lines(report, show_all="--all" in flags)))
    if "--json" in flags:
        print(json.dumps(as_json(report)))
    if report.reasons:
        raise JobFailedError


def lines(report: Report, *, show_all: bool = False) -> Iterator[str]:
    """The report as people read it."""
    for part in report.parts:
        yield f"{'data':<12}{part.where}: {part.num_usable} usable samples"
    for (kind, verdict), count in counted(report.faults).items():
        yield f"\n  {count:>6} x {kind.value} ({verdict.value})"
        members = [f for f in report.faults if (f.kind, f.verdict) == (kind, verdict)]
        shown = members if show_all else members[:NUM_SHOWN]
        yield from (f"           {fault.text}" for fault in shown)
        if len(members) > len(shown):
            yield f"           and {len(members) - len(shown)} more (--all names them)"
    yield from _batches(report)
    yield from (f"{'note':<12}{note}" for note in report.notes)
    if not report.reasons:
        yield f"{'verdict':<12}training would run"
    yield from (f"{'verdict':<12}training would refuse: {reason}" for reason in report.reasons)


def _batches(report: Report) -> Iterator[str]:
    whole = report.batch_size * report.num_ranks
    yield f"\n{'samples':<12}{report.num_train} to train on, {report.num_validation} held out"
    yield (
        f"{'batch':<12}{report.batch_size} per device x {report.num_ranks} ranks = {whole} samples "
        f"per step, {report.num_steps} steps per epoch"
    )
    if not report.tally:
        return
    yield f"\n{'class':<12}{'height':>8}{'width':>8}{'samples':>9}{'batches':>9}  arithmetic"
    for tally in report.tally:
        high, wide = (report.sides or {}).get(tally.name, ("-", "-"))
        used = tally.num_samples - tally.num_dropped + tally.num_repeated
        full, rest = divmod(used, whole)
        sums = f"{tally.num_samples}"
        if tally.num_dropped:
            sums += f" - {tally.num_dropped} dropped"
        if tally.num_repeated:
            sums += f" + {tally.num_repeated} repeated"
        sums += f" = {full} x {whole}" + (f" + {rest}" if rest else "")
        counts = f"{tally.num_samples:>9}{tally.num_batches:>9}"
        yield f"{tally.name:<12}{high:>8}{wide:>8}{counts}  {sums}"
    yield ""


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs: counts, and the files of every kind of fault."""

    def group(kind: Any, verdict: Verdict, faults: Sequence[Fault]) -> dict[str, Any]:
        return {
            "kind": kind.name.lower(),
            "verdict": verdict.name.lower(),
            "count": len(faults),
            "faults": [{"where": f.where, "text": f.text} for f in faults],
        }

    return {
        "refused": bool(report.reasons),
        "reasons": list(report.reasons),
        "notes": list(report.notes),
        "parts": [{"where": p.where, "usable": p.num_usable} for p in report.parts],
        "faults": [
            group(
                kind, verdict, [f for f in report.faults if (f.kind, f.verdict) == (kind, verdict)]
            )
            for kind, verdict in counted(report.faults)
        ],
        "train": report.num_train,
        "validation": report.num_validation,
        "batch_size": report.batch_size,
        "ranks": report.num_ranks,
        "global_batch": report.batch_size * report.num_ranks,
        "steps_per_epoch": report.num_steps,
        "drop_last": report.drop_last,
        "classes": [
            {
                "name": t.name,
                "sides": list((report.sides or {}).get(t.name, ())),
                "samples": t.num_samples,
                "batches": t.num_batches,
                "dropped": t.num_dropped,
                "repeated": t.num_repeated,
            }
            for t in report.tally
        ],
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

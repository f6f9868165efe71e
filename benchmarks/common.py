"""What every benchmark shares: its command line, environment, bars and report."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path("out")

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "==": lambda value, limit: value == limit,
}


@dataclass
class Report:
    """Figures (flat names), rows (the table) and bars (a figure with the limit it must keep)."""

    bench: str
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: dict[str, dict[str, Any]] = field(default_factory=dict)

    def bar(self, name: str, op: str, limit: float) -> None:
        """Hold a figure against a limit."""
        value = self.figures[name]
        holds = OPERATORS[op](value, limit)
        self.bars[name] = {"value": value, "op": op, "limit": limit, "holds": holds}

    def finish(self, *, as_json: bool) -> int:
        """Print the report; exit status 1 when a bar does not hold."""
        if as_json:
            data = {"bench": self.bench, "env": environment(), "command": command()}
            data |= {"figures": self.figures, "rows": self.rows, "bars": self.bars}
            print(json.dumps(data))
        else:
            print_table(self.rows)
            print()
            for name, value in self.figures.items():
                print(f"  {name:<32} {value:.6g}")
            for name, bar in self.bars.items():
                word = "holds" if bar["holds"] else "FAILS"
                print(f"  {word}: {name} = {bar['value']:.6g} {bar['op']} {bar['limit']:g}")
        return 0 if all(bar["holds"] for bar in self.bars.values()) else 1


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of equal keys as aligned columns."""
    if not rows:
        return
    cells = [[_cell(row.get(name)) for name in rows[0]] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(list(rows[0]), *cells, strict=True)]
    for line in [list(rows[0]), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def command() -> str:
    """The command line, without this machine's paths."""
    name = sys.modules["__main__"].__spec__
    return shlex.join(["python", "-m", name.name if name else "?", *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    packages = ("torch", "lightning", "diffusers", "transformers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": cores,
        **{name: version(name) for name in packages},
    }


def parser(text: str | None) -> argparse.ArgumentParser:
    """Options every benchmark has."""
    options = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="smaller and shorter; same checks")
    options.add_argument("--json", action="store_true", help="print one JSON object as last line")
    return options


def show(message: str) -> None:
    """Say where a long run is, on stderr so that stdout stays the report."""
    print(message, file=sys.stderr, flush=True)

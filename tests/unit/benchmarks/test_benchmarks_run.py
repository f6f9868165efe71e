"""Every benchmark can be started: what it imports exists, and it says what it measures."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HELPERS = ("common", "emulat", "models", "fill_emulated", "__init__")
NAMES = [
    path.stem
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if not path.stem.startswith(HELPERS)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_what_it_measures(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout

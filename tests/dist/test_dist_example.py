"""The script that the documentation shows runs as it stands, and means the same under DDP."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example.py"


def loss_under(strategy: str, folder: Path) -> float:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), strategy],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"^loss ([\d.]+)$", done.stdout.replace("\r", "\n"), re.MULTILINE)
    assert found is not None, done.stdout
    return float(found[1])


@pytest.mark.dist
def test_the_documented_script_trains_alike_on_two_stages_and_under_ddp(tmp_path: Path) -> None:
    pipelined = loss_under("diffusionpipe", tmp_path)
    assert pipelined == pytest.approx(loss_under("ddp", tmp_path), rel=1e-5)

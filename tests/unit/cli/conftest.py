"""Commands run in a folder of their own; variables that they set for child processes are undone."""

from pathlib import Path

import pytest

from lightning_dpipe.cli.console import QUIET_LIBRARIES

SET_BY_COMMANDS = ("HYDRA_FULL_ERROR", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", *QUIET_LIBRARIES)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in SET_BY_COMMANDS:
        monkeypatch.setenv(name, QUIET_LIBRARIES.get(name, "1"))

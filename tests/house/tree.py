"""The files that belong to the repository."""

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "lightning_dpipe"
_GENERATED = {".venv", "__pycache__", "out", "outputs", "multirun", "wandb", "lightning_logs"}


@cache
def repository_files() -> tuple[Path, ...]:
    """Tracked and new files; in a tree without git, all but generated and hidden ones."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0 and done.stdout:
        names = done.stdout.split("\0")[:-1]
        return tuple(sorted(ROOT / n for n in names if (ROOT / n).is_file()))
    return tuple(
        sorted(
            path
            for path in ROOT.rglob("*")
            if path.is_file()
            and not any(
                part in _GENERATED or (part[0] == "." and part != ".ci")
                for part in path.relative_to(ROOT).parts
            )
        )
    )


def python_files() -> tuple[Path, ...]:
    """All Python sources of the repository."""
    return tuple(path for path in repository_files() if path.suffix == ".py")


def name_of(path: Path) -> str:
    """Path from the root, as in error messages and exception lists."""
    return path.relative_to(ROOT).as_posix()

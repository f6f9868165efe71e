"""Imports point one way: checked on the syntax tree, and on what an import really loads.

Both are needed: the tree sees imports inside functions, the subprocess sees what a harmless
looking import pulls in.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.tree import PACKAGE, name_of, python_files

# folder -> what its files may import beside their own folder. "runtime.bound" allows one module.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "simulation": {"core"},
    "planning": {"core", "simulation"},
    "lowering": {"core"},
    "runtime": {"core"},
    "models": {"core", "runtime.bound"},
    "objective": {"core", "models"},
    "profiling": {"core", "models", "runtime", "version"},
    "data": {"core", "models", "objective"},
    "sampling": {"core", "lowering", "runtime", "models", "objective"},
    "strategy": {
        "core", "simulation", "planning", "lowering", "runtime", "models", "objective",
        "profiling", "data", "sampling", "version",
    },
    "cli": {
        "core", "simulation", "planning", "lowering", "runtime", "models", "objective",
        "profiling", "data", "sampling", "strategy", "version",
        "",  # the package itself, to register the strategy
    },
    "registration": {"core", "strategy"},
    "version": set(),
}  # fmt: skip

# third-party package -> where it may be imported: folders, or files with a reason beside them.
THIRD_PARTY: dict[str, set[str]] = {
    "torch": {
        "models", "objective", "profiling", "runtime", "data", "sampling", "strategy", "cli",
    },
    "torch.distributed": {"profiling/links.py", "runtime", "sampling", "strategy"},
    "lightning": {"strategy", "data", "cli"},
    "hydra": {
        "cli",
        "strategy/launcher.py",  # only if the user's own program runs under hydra already
    },
    "omegaconf": {"cli", "strategy/launcher.py"},
    "wandb": {"cli", "strategy/callbacks"},
    "diffusers": {"models", "objective", "profiling", "data", "sampling", "strategy", "cli"},
    "transformers": {"models", "data", "sampling", "strategy", "cli"},
}  # fmt: skip

NEVER = {"pytorch_lightning", "lightning_fabric"}


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that is imported, inside functions and by string too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) == ("torch", "distributed")
        ):
            yield node.lineno, "torch.distributed"
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def faults(path: Path, source: str) -> list[str]:
    """What a file imports against the rules."""
    relative = path.relative_to(PACKAGE).as_posix()
    folder = relative.split("/")[0].removesuffix(".py")
    package = ".".join(("lightning_dpipe", *relative.split("/")[:-1]))
    found = []
    for line, name in imports(ast.parse(source), package):
        if under(name, "lightning_dpipe"):
            target = name.removeprefix("lightning_dpipe").removeprefix(".")
            fine = (
                folder == "__init__"
                or under(target, folder)
                or any(under(target, a) for a in ALLOWED.get(folder, ()))
            )
        elif folder == "core":
            fine = name.split(".")[0] in sys.stdlib_module_names
        else:
            fine = not any(under(name, p) for p in NEVER) and all(
                any(relative == at or relative.startswith(at + "/") for at in places)
                for third_party, places in THIRD_PARTY.items()
                if under(name, third_party)
            )
        if not fine:
            found.append(f"{name_of(path)}:{line} imports {name}")
    return found


def test_every_folder_has_a_place_in_the_table() -> None:
    folders = {
        p.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for p in python_files()
        if PACKAGE in p.parents
    }
    assert folders - {"__init__"} <= set(ALLOWED)


def test_no_file_imports_against_the_direction() -> None:
    wrong = [
        fault
        for path in python_files()
        if PACKAGE in path.parents
        for fault in faults(path, path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_the_table_itself_has_no_circle() -> None:
    left = {folder: {a.split(".")[0] for a in allowed} for folder, allowed in ALLOWED.items()}
    while left:
        free = [folder for folder, needs in left.items() if not needs & set(left)]
        assert free, f"these import each other: {sorted(left)}"
        for folder in free:
            del left[folder]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/x.py", "import numpy"),
        ("lowering/x.py", "def f():\n    from lightning_dpipe.runtime import engine"),
        ("lowering/x.py", "from ..runtime import engine"),
        ("planning/x.py", "import torch"),
        ("models/x.py", "from lightning_dpipe.runtime.engine import Engine"),
        ("runtime/x.py", "import lightning.pytorch"),
        ("runtime/x.py", "from lightning_dpipe import models"),
        ("models/x.py", "import torch\ntorch.distributed.barrier()"),
        ("profiling/layers.py", "from torch import distributed"),
        ("strategy/x.py", "import hydra"),
        ("strategy/x.py", "import importlib\nimportlib.import_module('wandb')"),
        ("strategy/x.py", "import pytorch_lightning"),
    ],
)
def test_the_check_sees_a_wrong_import(file: str, source: str) -> None:
    assert len(faults(PACKAGE / file, source)) == 1


LOAD = """
import importlib, json, pkgutil, sys
heavy = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "matplotlib",
         "hydra", "wandb", "diffusers", "transformers")
loaded = {}
for package in ("lightning_dpipe", *("lightning_dpipe." + p for p in sys.argv[1:])):
    module = importlib.import_module(package)
    if package != "lightning_dpipe":
        for found in pkgutil.walk_packages(module.__path__, package + "."):
            importlib.import_module(found.name)
    loaded[package] = [name for name in heavy if name in sys.modules]
print(json.dumps(loaded))
"""


def test_importing_the_package_and_the_planning_side_loads_nothing_heavy() -> None:
    folders = ["core", "simulation", "lowering", "planning"]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *folders], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert loaded.pop("lightning_dpipe") == []
    assert loaded.pop("lightning_dpipe.core") == []
    for package, names in loaded.items():
        assert set(names) <= {"numpy"}, package

"""The string works in either import order, and importing the package costs nothing.

Each case runs in an interpreter of its own. The mechanism is tested on a tiny stand-in for
Lightning's registry, which loads in no time; one case runs the real ones.
"""

import subprocess
import sys
from pathlib import Path

import pytest

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description=""):
        assert name not in self
        self[name] = strategy
"""
STRATEGIES = REGISTRY + "StrategyRegistry = Registry()\n"


def run(code: str, folder: Path) -> str:
    """Run `code` in a fresh interpreter with `folder` first on its path."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake(folder: Path, strategies: str = STRATEGIES) -> Path:
    """Packages named like Lightning's, with nothing but a registry."""
    for name in ("lightning/pytorch/strategies", "pytorch_lightning/strategies"):
        package = folder / name
        package.mkdir(parents=True)
        for parent in (package.parent, package.parent.parent):
            if parent != folder:
                (parent / "__init__.py").write_text("")
        (package / "__init__.py").write_text(strategies)
    (folder / "later.py").write_text("")
    return folder


SHOW = """
from lightning.pytorch.strategies import StrategyRegistry as a
from pytorch_lightning.strategies import StrategyRegistry as b
print(a["diffusionpipe"].__name__, b["diffusionpipe"].__name__)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_dpipe",
        "import lightning.pytorch.strategies, lightning_dpipe",
        "import pytorch_lightning.strategies, lightning_dpipe",
        "import lightning.pytorch.strategies, pytorch_lightning.strategies, lightning_dpipe",
    ],
)
def test_registers_in_both_registries_in_any_order(code: str, tmp_path: Path) -> None:
    assert run(code + SHOW, fake(tmp_path)) == "_strategy _wrong_lightning"


def test_registers_when_imported_from_within_a_half_imported_lightning(tmp_path: Path) -> None:
    folder = fake(tmp_path, "import lightning_dpipe\n" + STRATEGIES + "import later\n")
    assert run(SHOW, folder) == "_strategy _wrong_lightning"


def test_the_hook_leaves_no_mark_on_the_module_it_waits_for(tmp_path: Path) -> None:
    code = """
import lightning_dpipe, importlib, lightning.pytorch.strategies as s
print(type(s.__loader__).__name__, s.__spec__.loader is s.__loader__)
importlib.reload(s)
print("diffusionpipe" in s.StrategyRegistry)
"""
    assert run(code, fake(tmp_path)) == "SourceFileLoader True\nTrue"


def test_an_import_that_fails_fails_as_it_would_without_us(tmp_path: Path) -> None:
    code = """
import lightning_dpipe
for name in ("lightning.pytorch.strategies", "lightning.nope"):
    try:
        __import__(name)
    except (RuntimeError, ImportError) as e:
        print(type(e).__name__, name in sys.modules)
"""
    folder = fake(tmp_path, "raise RuntimeError('broken')")
    assert run(code, folder) == "RuntimeError False\nModuleNotFoundError False"


def test_public_names_are_listed_and_others_are_refused(tmp_path: Path) -> None:
    code = """
import lightning_dpipe as d
assert set(d.__all__) <= set(dir(d))
try:
    d.nothing
except AttributeError as e:
    print(e)
assert d.Layer is d.Layer and d.Layer.__module__ == "lightning_dpipe.models.spec"
"""
    assert run(code, tmp_path) == "module 'lightning_dpipe' has no attribute 'nothing'"


def test_every_public_name_exists() -> None:
    import lightning_dpipe

    for name in lightning_dpipe.__all__:
        assert getattr(lightning_dpipe, name) is not None


def test_trainer_takes_the_string_and_the_other_lightning_says_what_to_import(
    tmp_path: Path,
) -> None:
    code = """
import lightning_dpipe
import lightning as L
options = dict(strategy="diffusionpipe", accelerator="cpu", logger=False)
strategy = L.Trainer(enable_checkpointing=False, **options).strategy
print(isinstance(strategy, lightning_dpipe.DiffusionPipeStrategy))
import pytorch_lightning as pl
try:
    pl.Trainer(**options)
except lightning_dpipe.core.errors.UnsupportedError as e:
    print(e)
"""
    works, refused = run(code, tmp_path).splitlines()[-2:]
    assert works == "True"
    assert "works with `import lightning.pytorch as pl`" in refused

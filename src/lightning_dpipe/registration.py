"""Makes ``Trainer(strategy="diffusionpipe")`` work after ``import lightning_dpipe``, cheaply.

Lightning keeps strategies in a dictionary that packages fill when they are imported; it has no
entry point for them. To fill it without importing Lightning (seconds), the name is registered at
once if ``lightning.pytorch.strategies`` is loaded already, and otherwise by an import hook right
after it has been, so that the order of the two imports does not matter.

``pytorch_lightning`` is a second copy of Lightning with its own registry and its own classes: a
strategy of one is refused by the Trainer of the other. There the name says so.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_dpipe.core.errors import UnsupportedError

NAME = "diffusionpipe"
DESCRIPTION = "Planned pipeline training of diffusion models, frozen encoders in the bubbles"


def register() -> None:
    """Register the strategy's name, now or as soon as Lightning's strategies are imported."""
    if not all([_register_in(name) for name in _FACTORIES]):
        sys.meta_path.insert(0, _AfterImport())


def _strategy(**options: Any) -> Any:
    module = importlib.import_module("lightning_dpipe.strategy.strategy")
    return module.DiffusionPipeStrategy(**options)


def _wrong_lightning(**options: Any) -> Any:
    raise UnsupportedError(
        f'strategy="{NAME}" works with `import lightning.pytorch as pl` (or `import lightning as '
        "L`), not with `import pytorch_lightning`, whose classes are separate copies; change the "
        "import of Trainer, LightningModule and callbacks"
    )


_FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _strategy,
    "pytorch_lightning.strategies": _wrong_lightning,
}


def _register_in(module_name: str) -> bool:
    """Register if the module has got as far as making its registry; True if it had."""
    registry = getattr(sys.modules.get(module_name), "StrategyRegistry", None)
    if registry is None:
        return False
    if NAME not in registry:
        registry.register(NAME, _FACTORIES[module_name], description=DESCRIPTION)
    return True


class _AfterImport(MetaPathFinder):
    """Finds no module itself; sees to it that `_register_in` runs after the awaited ones.

    A module that was half imported when we came cannot be caught at its end any more, so every
    later import looks at it again. (The hook stays: removing it from the list that the import
    system is walking would make it skip the next finder.)
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for name in _FACTORIES:
            _register_in(name)
        if fullname not in _FACTORIES:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Runs the module with its own loader, then registers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if we had never been here: resources and reload use its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register_in(module.__name__)

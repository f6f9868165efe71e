"""Weights that come after the plan: a rank never holds what belongs to other stages.

In:     a DiffusionModule's ``configure_model``, run by a strategy that cuts the model.
Out:    a module whose backbones are on meta, and a `Later` that fills in the layers a rank keeps,
        weight by weight. What every rank needs (frozen components, which fill bubbles, and weights
        that no layer owns) is there at once.

Numbers are those of a plain build in one process (`models.deferred`). Ranks of a script without a
seed take rank 0's generator for the build.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor, nn

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.models.deferred import Recording, fill_in, recording
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.strategy.collectives import HostLink

log = logging.getLogger(__name__)


class Later:
    """The parameters of one build that have no values yet."""

    def __init__(self, module: nn.Module, made: Recording) -> None:
        self._made = made
        # By object: a conversion to another dtype changes what a parameter is stored in.
        self._sources: dict[int, tuple[nn.Parameter, Tensor]] = {
            id(p): (p, p.detach()) for p in module.parameters() if made.knows(p)
        }
        for owner in module.modules():
            for store in (owner._buffers, vars(owner)):
                for name, value in list(store.items()):
                    if isinstance(value, Tensor) and made.knows(value):
                        store[name] = made.value(value)

    def __len__(self) -> int:
        return len(self._sources)

    def explains(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether all of them that are on meta can be filled in."""
        return all(not p.is_meta or id(p) in self._sources for p in parameters)

    def fill(self, parameters: Iterable[nn.Parameter], device: torch.device | None = None) -> None:
        """Give parameters their values, in place, each as soon as it is made on its device."""
        for parameter in parameters:
            found = self._sources.pop(id(parameter), None)
            if found is None:
                continue
            value = self._made.value(found[1])
            fill_in(parameter, value.to(device or value.device, parameter.dtype))


def build_later(module: nn.Module, configure: Callable[[], None], link: HostLink) -> Later | None:
    """Run `configure` and keep values for later; None: everything has its value already.

    Code that cannot be recorded is run again plainly, so its errors are those of a plain run.
    """
    before = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
    with _same_numbers(link):
        states = _collect_rng_states()
        try:
            with recording() as made:
                configure()
        except DPipeError:
            raise
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            log.info("building the whole model on every rank: %s", error)
            vars(module).clear()
            vars(module).update(before)
            _set_rng_states(states)
            configure()
            return None
    later = Later(module, made)
    return later if len(later) else None


def needed_everywhere(module: nn.Module, spec: PipelineSpec) -> Iterator[nn.Parameter]:
    """Parameters that are in no backbone, or in a frozen component too."""
    cut = {id(p) for b in spec.backbones for layer in b.layers for p in layer.parameters()}
    shared = {id(p) for c in spec.frozen for layer in c.layers for p in layer.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in cut or id(parameter) in shared:
            yield parameter


@contextmanager
def _same_numbers(link: HostLink) -> Iterator[None]:
    """Draw what rank 0 draws; a rank that would draw the same goes on from there."""
    mine = torch.get_rng_state(), _gpu_state()
    theirs: tuple[Any, Any] = link.broadcast_object(mine)
    same = all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(mine, theirs, strict=True)
    )
    with nullcontext() if same else torch.random.fork_rng():
        if not same:
            torch.set_rng_state(theirs[0])
            if theirs[1] is not None:
                torch.cuda.set_rng_state(theirs[1])
        yield


def _gpu_state() -> Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None

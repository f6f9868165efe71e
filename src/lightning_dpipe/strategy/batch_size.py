"""The batch size that a plan is made for: given, as the loader says, or as before."""

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_dpipe.core.errors import UnsupportedError
from lightning_dpipe.strategy.collectives import HostLink
from lightning_dpipe.strategy.loaders import loader_batch_size


def find_batch_size(trainer: Any, *, given: int | None, planned: int | None, link: HostLink) -> int:
    """Samples per device, equal on all ranks. Collective.

    Args:
        trainer: Its loop has the loaders.
        given: What the user said.
        planned: That of the plan in use, if there is one.
        link: Over all ranks.

    Raises:
        UnsupportedError: There are several training loaders, or nothing tells the size.
    """
    size = given
    if size is None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        loop = trainer.fit_loop if fitting else trainer._active_loop
        # Lightning asks for the loaders here too when a scheduler wants the number of steps.
        loop.setup_data()
        combined = loop._combined_loader
        loaders = () if combined is None else combined.flattened
        if fitting and len(loaders) > 1:
            raise UnsupportedError(
                f"{len(loaders)} training loaders; a pipeline trains from exactly 1: combine "
                "the datasets, for example with ConcatDataset"
            )
        size = loader_batch_size(loaders)
    if size is None:
        if planned is not None:
            return planned
        raise UnsupportedError(
            "the loader does not tell its batch size; pass DiffusionPipeStrategy(batch_size=...)"
        )
    return min(link.gather(size))

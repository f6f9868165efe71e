"""Rank 0 of a machine downloads, its other ranks wait: on a key of the job's store, not in a
collective, so that no timeout ends a download that takes its time.

In: this rank's place on its machine. Out: a `models.turns.Turns`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.strategy.failure import this_node

log = logging.getLogger(__name__)

_LOOK_S = 0.2
PATIENCE_S = 5.0
"""After this a waiting rank says what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTurns:
    """The machine's rank 0 first, then the others."""

    store: Any
    local_rank: int
    patience_s: float = PATIENCE_S

    def __call__(self, what: str, load: Callable[[], Any]) -> Any:
        """Load in turn.

        Raises:
            SpecError: This is not the first rank, and the first one's load failed.
        """
        key = f"dpipe/load/{this_node()}/{what}"
        if self.local_rank != 0:
            self._wait(key, what)
            return load()
        try:
            loaded = load()
        except Exception as error:
            self.store.set(key, f"failed: {error}")
            raise
        self.store.set(key, "done")
        return loaded

    def _wait(self, key: str, what: str) -> None:
        start_s, said = time.monotonic(), False
        while not self.store.check([key]):
            if not said and time.monotonic() - start_s > self.patience_s:
                said = True
                log.warning("waiting for this machine's first rank to load %s", what)
            time.sleep(_LOOK_S)
        state = self.store.get(key).decode()
        if state != "done":
            raise SpecError(f"this machine's first rank could not load {what}; it {state}")


def node_turns(local_rank: int) -> NodeTurns | None:
    """Turns over the job's store; None where there is one rank only."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return NodeTurns(store=dist.distributed_c10d._get_default_store(), local_rank=local_rank)

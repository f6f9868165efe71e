"""A loader that continues within an epoch: its state is the number of batches it handed out.

In:     a `BucketBatchSampler`, whose order is a function of (seed, epoch, batch size, ranks).
Out:    the batches after those that were handed out when the state was saved; nothing is read
        twice, and what is skipped is not decoded.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

log = logging.getLogger(__name__)


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A ``DataLoader`` with a `BucketBatchSampler`, and the state that Lightning saves."""

    _position: tuple[int, int] | None = None  # the epoch, and batches of it handed out

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler: Any = self.batch_sampler
        epoch, done = sampler.upcoming()
        self._position = epoch, done
        for batch in super().__iter__():
            done += 1
            self._position = (epoch, done) if done < len(self) else (epoch + 1, 0)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch lies, and what its place depends on."""
        sampler: Any = self.batch_sampler
        epoch, done = sampler.upcoming() if self._position is None else self._position
        return {"epoch": epoch, "num_batches": done, **self._layout()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next epoch start where the saved one stopped."""
        sampler: Any = self.batch_sampler
        if {name: state.get(name) for name in self._layout()} != self._layout():
            log.warning(
                "the epoch starts anew, for its order is another one: the checkpoint was written "
                "with %s, this run has %s",
                {name: state.get(name) for name in self._layout()}, self._layout(),
            )  # fmt: skip
            return
        sampler.resume(state["epoch"], state["num_batches"])

    def _layout(self) -> dict[str, int]:
        sampler: Any = self.batch_sampler
        return {
            "batch_size": sampler.batch_size,
            "num_replicas": sampler.num_replicas,
            "num_samples": len(sampler.buckets),
            "seed": sampler.seed,
        }

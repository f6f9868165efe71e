"""`BubbleFill`: run the frozen work of the next batch inside the pipeline's bubbles."""

import logging
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_dpipe.core.errors import UnsupportedError

log = logging.getLogger(__name__)


class OpenCache(Protocol):
    """What the callback needs of an open cache: batches found and not found, and its end."""

    hits: int
    misses: int

    def close(self) -> None:
        """Finish writing."""


class BubbleFill(Callback):
    """Its presence turns filling on; losses stay the same.

    `DiffusionPipeStrategy` then plans fills and looks one batch ahead. Under another strategy there
    is no bubble, so that a run compared with this one only has to change its strategy.

    Args:
        cache: ``"disk"`` keeps what the encoders make of each sample (a VAE's mean and
            log-variance, so that latents stay random) and reads it in later epochs instead of
            encoding again. What depends on random draws runs in the bubbles as before. ``"off"``
            keeps nothing.
        cache_dir: Folder of what is kept; by default ``lightning-dpipe/encodings`` in the user's
            cache folder. Ranks on several machines share what is kept if they share the folder.

    Raises:
        UnsupportedError: `cache` is neither of the two.
    """

    def __init__(self, cache: str | bool = "off", cache_dir: str | Path | None = None) -> None:
        if cache is False:  # what YAML makes of a bare `off`
            cache = "off"
        if cache not in ("off", "disk"):
            raise UnsupportedError(f'BubbleFill(cache={cache!r}); choose "disk" or "off"')
        self.keeps = cache == "disk"
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._open: OpenCache | None = None
        self._counted = (0, 0)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Say so when there is no pipeline."""
        if not hasattr(trainer.strategy, "logs_global"):
            rank_zero_warn(
                f"BubbleFill does nothing under {type(trainer.strategy).__name__}, which has no "
                'pipeline and so no bubbles (strategy="diffusionpipe" has)'
            )

    def opened(self, cache: OpenCache) -> None:
        """Take over a cache that the strategy has opened."""
        self._open, self._counted = cache, (0, 0)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Say how many batches were found, and warn where nothing ever is."""
        if self._open is None:
            return
        now = (self._open.hits, self._open.misses)
        hits, misses = (a - b for a, b in zip(now, self._counted, strict=True))
        self._counted = now
        if trainer.is_global_zero:
            log.info("encodings of %d of %d batches were at hand", hits, hits + misses)
            if trainer.current_epoch > 0 and misses and not hits:
                log.warning(
                    "after epoch %d no batch was found among the kept encodings: does the data "
                    "change from epoch to epoch, or do machines not share cache_dir?",
                    trainer.current_epoch,
                )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finish writing what is kept."""
        if self._open is not None:
            self._open.close()
            self._open = None

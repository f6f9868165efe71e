"""`BubbleFill`: run the frozen work of the next batch inside the pipeline's bubbles."""

from typing import Any

from lightning.pytorch import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn


class BubbleFill(Callback):
    """Its presence turns filling on; losses stay the same.

    `DiffusionPipeStrategy` then plans fills and looks one batch ahead. Under another strategy there
    is no bubble, so that a run compared with this one only has to change its strategy.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Say so when there is no pipeline."""
        if not hasattr(trainer.strategy, "logs_global"):
            rank_zero_warn(
                f"BubbleFill does nothing under {type(trainer.strategy).__name__}, which has no "
                'pipeline and so no bubbles (strategy="diffusionpipe" has)'
            )

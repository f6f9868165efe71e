"""`BubbleFill`: run the frozen work of the next batch inside the pipeline's bubbles."""

from typing import Any

from lightning.pytorch import Callback

from lightning_dpipe.core.errors import UnsupportedError


class BubbleFill(Callback):
    """Its presence turns filling on; losses stay the same.

    `DiffusionPipeStrategy` then plans fills and looks one batch ahead. Under another strategy there
    are no bubbles: it is refused there, rather than silently doing nothing.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that there is a pipeline.

        Raises:
            UnsupportedError: The strategy has none.
        """
        if not hasattr(trainer.strategy, "logs_global"):
            raise UnsupportedError(
                f"BubbleFill under {type(trainer.strategy).__name__}, which has no pipeline and so "
                'no bubbles; use strategy="diffusionpipe", or remove the callback'
            )

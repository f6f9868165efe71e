"""Where a checkpoint comes from, kept inside it, so that a model card can say so.

In:     the recipe's name and the running trainer.
Out:    ``dpipe_run`` in every checkpoint: recipe, number of training samples, samples a step, and
        the commit of this package's sources if they are a checkout.
"""

import subprocess
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

import lightning_dpipe


class Provenance(Callback):
    """Write ``dpipe_run``. `recipe` is None for a config without one."""

    def __init__(self, recipe: str | None) -> None:
        self.recipe = recipe

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add plain numbers and text only: checkpoints are read with ``weights_only``."""
        loader = trainer.train_dataloader
        batch_size = getattr(loader, "batch_size", None)
        checkpoint["dpipe_run"] = {
            "recipe": self.recipe,
            "num_samples": _size(getattr(loader, "dataset", None)),
            "samples_per_step": None
            if batch_size is None
            else batch_size * trainer.world_size * trainer.accumulate_grad_batches,
            "commit": commit_of(Path(lightning_dpipe.__file__).parent),
        }


def commit_of(folder: Path) -> str | None:
    """Commit of the checkout that `folder` is part of, ``-dirty`` if it differs; None: no one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        owned = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"],
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here: a card without a commit
        return None
    # An installed package inside somebody's repository is not that repository's code.
    return done.stdout.strip() if done.returncode == 0 == owned.returncode else None


def _size(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # a stream
        return None

"""A callback for `test_dist_sweep`: one job of a sweep loses a rank in mid-training."""

import os
from typing import Any

from lightning.pytorch import Callback


class RankFails(Callback):
    """Rank 1 raises in its second step, in the job with these values only."""

    def __init__(self, *, num_microbatches: int, seed: int) -> None:
        self.job = (num_microbatches, seed)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        here = (trainer.strategy.plan.num_microbatches, int(os.environ["PL_GLOBAL_SEED"]))
        if here == self.job and trainer.global_rank == 1 and batch_idx == 1:
            raise RuntimeError("rank 1 of this job fails on purpose")

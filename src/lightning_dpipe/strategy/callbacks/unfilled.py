"""Measure one iteration with the frozen work up front: what bubbles cost when nothing fills them.

In:     a run whose bubbles are filled.
Out:    the timeline of one unfilled iteration, and its bubble ratio in the log. Losses are the same
        filled or not, so the run is not changed by it.
"""

import time
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback

from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.runtime.trace import merge
from lightning_dpipe.strategy.recorder import Recorder
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy


class UnfilledProbe(Callback):
    """Leave two iterations unfilled early in training and trace the second.

    The first one finds its batch encoded already; the second has to encode up front.

    Args:
        step: Batch (from 1) of the first of the two.
    """

    def __init__(self, step: int = 6) -> None:
        self.step = step
        self.timeline: Timeline | None = None
        self._count = 0
        self._recorder: Recorder | None = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hold back the lookahead for two batches, and record during the second."""
        strategy = trainer.strategy
        if self.timeline is not None or not isinstance(strategy, DiffusionPipeStrategy):
            return
        self._count += 1
        if not self.step <= self._count <= self.step + 1 or not strategy.plan.fills:
            return
        outlooks = strategy.installed.runner.training
        outlooks[0] = replace(outlooks[0], next_ticket=None, next_batch=None, next_sizes=None)
        if self._count == self.step + 1:
            self._recorder = Recorder(strategy.root_device, time.monotonic_ns())
            strategy.recorder = self._recorder
            strategy.installed.session.trace(True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Put the ranks' records together."""
        strategy, recorder = trainer.strategy, self._recorder
        if recorder is None or strategy.recorder is not recorder:
            return
        self._recorder = strategy.recorder = None
        strategy.installed.session.trace(False)
        last = strategy.installed.runner.last
        assert last is not None
        assert last.trace is not None
        traces = strategy.link.gather_objects(recorder.iteration(last.trace))
        self.timeline = merge([traces[rank] for rank in strategy.plan.groups[0]])
        pl_module.log("pipeline/bubble_ratio_unfilled", self.timeline.bubble_ratio)

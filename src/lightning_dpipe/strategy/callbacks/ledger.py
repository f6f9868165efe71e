"""`Ledger`: where an iteration's device time goes, measured, and compared with the plan.

In:     traces of all ranks, gathered every n steps.
Out:    logged numbers (bubble ratio, fill ratio, prediction error, samples/s, device seconds per
        activity) and a picture of measured and predicted timelines.

The device seconds sum to devices x iteration. Between traced steps nothing is recorded.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.core.timeline import Activity, Timeline
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.runtime.trace import merge
from lightning_dpipe.simulation.render import save_png
from lightning_dpipe.simulation.simulate import simulate
from lightning_dpipe.strategy.pair_fills import CachedFills, PairFills
from lightning_dpipe.strategy.recorder import Recorder
from lightning_dpipe.strategy.strategy import DiffusionPipeStrategy

log = logging.getLogger(__name__)


class Ledger(Callback):
    """Logs the time ledger under ``time/``, ``pipeline/`` and ``train/``.

    Args:
        every_n_steps: Batches between two traced ones. A traced step waits for the device, so it is
            a little slower.
        first_step: The first traced batch; earlier ones warm up.
        picture: Whether to save ``timelines/step_N.png`` in the logger's folder (and to W&B).
    """

    def __init__(
        self, *, every_n_steps: int = 50, first_step: int = 3, picture: bool = True
    ) -> None:
        self.every_n_steps = every_n_steps
        self.picture = picture
        self.timeline: Timeline | None = None
        self.predicted: Timeline | None = None
        self.picture_path: Path | None = None
        self._count = 0
        self._next_due = first_step
        self._iteration_start_ns: int | None = None
        self._self_conditioned = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The time between epochs is nobody's data wait."""
        self._iteration_start_ns = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start recording if it is this step's turn."""
        self._count += 1
        strategy, start_ns = trainer.strategy, self._iteration_start_ns
        # The batch on which the optimizer steps: its iteration has every kind of work in it.
        steps = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        due = steps and self._count >= self._next_due
        if not isinstance(strategy, DiffusionPipeStrategy) or not due or start_ns is None:
            return
        if strategy.plan.fills and not strategy.installed.runner.looks_ahead:
            return  # the last step fills nothing: it says little about the others
        self._next_due = self._count + self.every_n_steps
        strategy.recorder = Recorder(strategy.root_device, start_ns)
        strategy.recorder.add(start_ns, Activity.DATA, "data")
        strategy.installed.session.trace(True)
        self._self_conditioned = pl_module.is_self_conditioned(pl_module.batches_consumed)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Log the whole model's gradient norm on traced steps."""
        strategy = trainer.strategy
        if isinstance(strategy, DiffusionPipeStrategy) and strategy.recorder is not None:
            pl_module.log("train/grad_norm", strategy.total_norm(optimizer))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Gather the ranks' records and log what they add up to."""
        strategy = trainer.strategy
        if isinstance(strategy, DiffusionPipeStrategy) and strategy.recorder is not None:
            self._report(trainer, pl_module, strategy, strategy.recorder)
        self._iteration_start_ns = time.monotonic_ns()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The time of a validation is no data wait either."""
        self._iteration_start_ns = None

    def _report(
        self, trainer: Any, module: Any, strategy: DiffusionPipeStrategy, recorder: Recorder
    ) -> None:
        strategy.recorder = None
        strategy.installed.session.trace(False)
        last = strategy.installed.runner.last
        assert last is not None
        trace = None if last.trace is None else recorder.iteration(last.trace)
        traces = strategy.link.gather_objects(trace)
        groups = [[traces[rank] for rank in group] for group in strategy.plan.groups]
        if any(trace is None for group in groups for trace in group):
            return
        timelines = [merge(group) for group in groups]
        self.timeline = timelines[0]
        self.predicted = self._predict(strategy)
        rows = _rows(timelines, self.predicted, strategy.plan.batch_size)
        # Equal on all ranks: they were computed from the same gathered records.
        module.log_dict(rows, on_step=True, on_epoch=False)
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir asks all ranks
        if self.picture and trainer.is_global_zero:
            self._draw(trainer, folder / "timelines")

    def _predict(self, strategy: DiffusionPipeStrategy) -> Timeline | None:
        """The plan's own timeline of a steady step like the one measured."""
        built = strategy.installed.built
        if built.profile is None:
            return None
        plan, profile, session = built.plan, built.profile, strategy.installed.session
        pair, groups = session.last_pair, session.last_cached
        if groups and isinstance(session.cached_fills, CachedFills):
            plan = replace(plan, fills=session.cached_fills(*pair, groups))
            profile = session.cached_fills.profile(*pair, groups)
        elif pair != (BASE, BASE) and isinstance(session.fills, PairFills):
            plan = replace(plan, fills=session.fills(*pair))
            profile = session.fills.profile(*pair)
        sizes = (plan.batch_size,) * plan.num_devices
        shape = StepShape(
            sizes=sizes,
            next_sizes=sizes if plan.fills else None,
            encoded=bool(plan.fills),
            self_conditioned=self._self_conditioned,
        )
        schedule = schedule_of(plan, self_conditioned=self._self_conditioned)
        return simulate(plan, schedule, profile, shape=shape)

    def _draw(self, trainer: Any, folder: Path) -> None:
        path = folder / f"step_{trainer.global_step}.png"
        timelines = [t for t in (self.timeline, self.predicted) if t is not None]
        save_png(timelines, path, f"step {trainer.global_step}\nmeasured\npredicted")
        self.picture_path = path
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image("timeline", [str(path)])


def _rows(
    timelines: list[Timeline], predicted: Timeline | None, batch_size: int
) -> dict[str, float]:
    """Numbers of one iteration, over all pipelines."""
    count = len(timelines)
    end_us = max(t.end_us for t in timelines)
    samples = batch_size * sum(t.num_devices for t in timelines)
    rows = {
        "pipeline/bubble_ratio": sum(t.bubble_ratio for t in timelines) / count,
        "pipeline/fill_ratio": sum(t.fill_ratio for t in timelines) / count,
        "train/samples_per_s": samples * 1e6 / max(end_us, 1),
        "time/iteration_s": end_us / 1e6,
    }
    for timeline in timelines:
        for activity, spent_us in timeline.ledger().items():
            key = f"time/{activity}_s"
            rows[key] = rows.get(key, 0.0) + spent_us / 1e6
    if predicted is not None and predicted.end_us:
        measured_us = end_us - max(_outside_us(t) for t in timelines)
        rows["pipeline/prediction_error"] = predicted.end_us / max(measured_us, 1) - 1.0
        rows["pipeline/predicted_s"] = predicted.end_us / 1e6
    return rows


def _outside_us(timeline: Timeline) -> int:
    """Data wait and host time of the slowest device, which a plan does not predict."""
    outside = (Activity.DATA, Activity.HOST)
    return max(
        sum(s.length_us for s in timeline.spans if s.device == device and s.activity in outside)
        for device in range(timeline.num_devices)
    )

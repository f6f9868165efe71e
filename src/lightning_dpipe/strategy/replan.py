"""Fill bubbles anew while training, from what steps really take.

In:     traces of a few steps on all ranks, every n steps. Cuts, stages and micro-batches stay.
Out:    the same plan with other fills, switched to between two steps, the same two on all ranks; or
        the old ones again, if the measured iteration got longer.

Rank 0 corrects the profile by the traces, fills anew and compares both under the corrected costs.
What was encoded ahead under the old fills stays valid: at the end of a step the whole next batch is
encoded, wherever its pieces ran. Losses are the same as without, up to what a frozen kernel makes
of another batch size. A traced step waits for the device, so it is a little slower.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.jsonio import digest, from_data, to_data
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.planning.search import with_fills
from lightning_dpipe.planning.variants import SELF_CONDITIONING, expected_us
from lightning_dpipe.profiling.calibrate import calibrate
from lightning_dpipe.runtime.trace import StepTrace, merge

log = logging.getLogger(__name__)

TRACED_STEPS = 3
"""Steps that are traced before new fills are made, and again after a switch."""

LEAST_GAIN = 0.01
"""Predicted share of the iteration that new fills must save."""


class Tells(Protocol):
    """What ranks ask each other (`collectives.HostLink`)."""

    rank: int

    def gather_objects(self, value: Any) -> list[Any]:
        """One object of every rank, by rank."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The object of rank `source`."""

    def compare(self, what: str, mark: str) -> None:
        """Check that all ranks hold the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """New fills, the corrected costs behind them, and the predicted share of time they save."""

    plan: Plan
    profile: Profile
    gain: float


def propose(
    plan: Plan,
    profile: Profile,
    timelines: Sequence[Timeline],
    probability: float = SELF_CONDITIONING,
) -> Proposal | None:
    """Fill anew under measured costs; None if that saves too little. Deterministic.

    Args:
        plan: What ran.
        profile: The costs it was made for.
        timelines: Measured steps at the plan's batch size.
        probability: Share of self-conditioned steps, if the model has them.
    """
    # Traces cover the engine's step only, so they say nothing of what comes around it.
    measured = replace(calibrate(profile, plan, timelines), overhead_us=profile.overhead_us)
    refilled = replace(with_fills(plan, measured), profile_digest=digest(measured))
    old_us = expected_us(plan, measured, probability)
    gain = 1 - expected_us(refilled, measured, probability) / max(old_us, 1)
    if gain <= LEAST_GAIN or refilled.fills == plan.fills:
        return None
    return Proposal(plan=refilled, profile=measured, gain=gain)


class Phase(Enum):
    """What a replanner is waiting for."""

    REST = "rest"
    MEASURE = "measure"
    TRY = "try"


@dataclass(slots=True)
class _Trial:
    """Fills that are in use and may go again."""

    old_plan: Plan
    old_profile: Profile
    gain: float
    before_us: float
    warming: bool = True


class Replanner:
    """Watches the steps of one rank; all ranks call it alike.

    Args:
        every_n_steps: Steps between two attempts.
        plan: The plan in use.
        profile: The costs behind it.
        link: Connects the ranks.
        adopt: Makes a plan and its profile the ones in use, from the next step on.
        probability: Share of self-conditioned steps, if the model has them.

    Raises:
        PlanError: `every_n_steps` is less than 1.
    """

    def __init__(
        self,
        *,
        every_n_steps: int,
        plan: Plan,
        profile: Profile,
        link: Tells,
        adopt: Callable[[Plan, Profile], None],
        probability: float = SELF_CONDITIONING,
    ) -> None:
        if every_n_steps < 1:
            raise PlanError(
                f"replan_every_n_steps={every_n_steps}; give at least 1, or leave it out"
            )
        self.every_n_steps = every_n_steps
        self.settled = plan
        self.phase = Phase.REST
        self._plan, self._profile = plan, profile
        self._link, self._adopt, self._probability = link, adopt, probability
        self._count = 0
        self._variant: bool | None = None
        self._traces: list[StepTrace] = []
        self._trial: _Trial | None = None
        self._rejected: set[str] = set()

    def wants(self, *, steady: bool, self_conditioned: bool) -> bool:
        """Whether the step that comes now is to be traced.

        Args:
            steady: Full batches, this one encoded ahead and the next one to be encoded.
            self_conditioned: Times of the two variants are not compared with each other.
        """
        self._count += 1
        if self.phase is Phase.REST and self._count % self.every_n_steps == 0:
            self.phase = Phase.MEASURE
            return False  # the next ones are
        if self.phase is Phase.REST or not steady:
            return False
        if self._trial is not None and self._trial.warming:
            self._trial.warming = False  # lowers its program and allocates
            return False
        if self._variant is None:
            self._variant = self_conditioned
        return self._variant == self_conditioned

    def traced(self, trace: StepTrace) -> Mapping[str, float]:
        """Take note of a traced step; returns numbers to log, equal on all ranks. Collective."""
        self._traces.append(trace)
        if len(self._traces) < TRACED_STEPS:
            return {}
        by_rank: list[list[StepTrace]] = self._link.gather_objects(self._traces)
        self._traces = []
        steps = [
            [merge([by_rank[rank][i] for rank in group]) for group in self._plan.groups]
            for i in range(TRACED_STEPS)
        ]
        measured_us = statistics.median(max(t.end_us for t in step) for step in steps)
        if self._trial is None:
            self._start_trial([t for step in steps for t in step], measured_us)
            return {}
        return self._end_trial(self._trial, measured_us)

    def _start_trial(self, timelines: Sequence[Timeline], before_us: float) -> None:
        """Switch to new fills if rank 0 finds better ones."""
        box = None
        if self._link.rank == 0:
            found = propose(self._plan, self._profile, timelines, self._probability)
            if found is not None and _mark(found.plan) not in self._rejected:
                box = (to_data(found.plan), to_data(found.profile), found.gain)
        box = self._link.broadcast_object(box)
        if box is None:
            self._rest()
            return
        plan, profile, gain = from_data(Plan, box[0]), from_data(Profile, box[1]), float(box[2])
        self._link.compare("the new plan", digest(plan))
        self._trial = _Trial(self._plan, self._profile, gain, before_us)
        self.phase = Phase.TRY
        self._use(plan, profile)
        if self._link.rank == 0:
            log.info(
                "new fills after step %d, %.1f %% faster if costs hold", self._count, 100 * gain
            )

    def _end_trial(self, trial: _Trial, after_us: float) -> Mapping[str, float]:
        """Keep the new fills, or take the old ones if they were faster."""
        self._trial = None
        self._rest()
        kept = after_us <= trial.before_us
        if kept:
            self.settled = self._plan
        else:
            self._rejected.add(_mark(self._plan))
            self._use(trial.old_plan, trial.old_profile)
        if self._link.rank == 0:
            log.info(
                "new fills %s: measured step %.2f ms, before %.2f ms (predicted gain %.1f %%)",
                "kept" if kept else "dropped",
                after_us / 1e3, trial.before_us / 1e3, 100 * trial.gain,
            )  # fmt: skip
        return {
            "replan/predicted_gain": trial.gain,
            "replan/before_s": trial.before_us / 1e6,
            "replan/after_s": after_us / 1e6,
            "replan/kept": float(kept),
        }

    def _rest(self) -> None:
        self.phase, self._variant = Phase.REST, None

    def _use(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._profile = plan, profile
        self._adopt(plan, profile)


def replanner_of(
    every_n_steps: int | None,
    *,
    plan: Plan,
    profile: Profile | None,
    link: Tells,
    adopt: Callable[[Plan, Profile], None],
) -> Replanner | None:
    """A replanner if one is asked for and there is something to fill; says so if there is not."""
    if every_n_steps is None:
        return None
    if plan.fills and profile is not None:
        return Replanner(
            every_n_steps=every_n_steps, plan=plan, profile=profile, link=link, adopt=adopt
        )
    if link.rank == 0:
        log.warning(
            "replan_every_n_steps=%d does nothing: no bubble is filled (that takes the BubbleFill "
            "callback and a model with frozen components)",
            every_n_steps,
        )
    return None


def _mark(plan: Plan) -> str:
    """Identity of a plan's fills."""
    return digest(replace(plan, profile_digest=""))

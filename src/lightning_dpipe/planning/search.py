"""Make a Plan from a Profile: cut, place, choose micro-batches, fill.

In:     a Profile, the world and the batch per device.
Out:    a Plan, deterministic: every rank that holds the same profile makes the same one.

Numbers that the user gives are taken; "auto" leaves them to the search of `auto`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.origin import origin_of
from lightning_dpipe.core.plan import Plan, Stage, default_groups, split_sizes
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.auto import Progress, Space, search
from lightning_dpipe.planning.mixed import search_mixed
from lightning_dpipe.planning.network import Network
from lightning_dpipe.planning.opposite import Cuts, num_stages_of, opposite_stages, with_lengths
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.variants import SELF_CONDITIONING, filler_of, with_fills

__all__ = ["MICROBATCHES_PER_STAGE", "make_plan", "schedule_of", "with_fills"]

log = logging.getLogger(__name__)

MICROBATCHES_PER_STAGE = 4

MEASURED_MARGIN = 0.02
"""Predictions from measured layers are off by about so much, and not alike for all plans: below it
the simpler plan is the safer one (`auto.Space.margin`)."""

Auto = Literal["auto"]


def make_plan(
    profile: Profile,
    *,
    world_size: int,
    batch_size: int,
    num_stages: int | Auto | None = None,
    num_microbatches: int | Auto | None = None,
    schedule: str = "1f1b",
    fill: bool | str = True,
    cuts: Cuts | None = None,
    probability: float = SELF_CONDITIONING,
    objective: str = "simulated",
    progress: Progress | None = None,
    network: Network | None = None,
    margin: float = 0.0,
) -> Plan:
    """Plan the training of one backbone, or of several in opposite directions (see `opposite`).

    Args:
        profile: Costs of the model on the device it will run on.
        world_size: All ranks.
        batch_size: Samples per device.
        num_stages: Devices of one pipeline; by default what `cuts` makes, else all ranks. "auto":
            stages, devices of a pipeline and replicas of each stage are searched for, within the
            profile's memory; one stage is data parallelism.
        num_microbatches: Parts of a pipeline's batch; by default 4 x stages, at most its samples,
            or searched for with ``num_stages="auto"``. "auto": searched for.
        schedule: A key of `planning.schedules.SCHEDULES`.
        fill: Whether frozen work runs ahead in bubbles, rather than up front; "paper" places it as
            DiffusionPipe does, "whole" as by default but without splitting a layer's batch.
        cuts: First layer of every stage but the first, by backbone if there are several; by default
            the fastest slowest stage.
        probability: Share of self-conditioned steps, if the model has them.
        objective: "paper" cuts by DiffusionPipe's T_max (`dp`, `pair_dp`); "simulated" balances a
            given number of stages, and in a search goes by the simulated iteration.
        progress: Called during a search, see `auto.Progress`.
        network: The cluster's nodes and links; pipelines are then put on nodes as fits best.
        margin: What a search takes for a tie, relative: see `auto.Space` and `MEASURED_MARGIN`.

    On devices of several kinds (`Profile.kinds`) who serves which stage, and with which share of
    the rows, is always searched for; `num_stages` are then stages, on any number of devices.

    Raises:
        PlanError: The numbers do not fit each other or the model.
        ScheduleError: The schedule is unknown.
        UnsupportedError: A backbone reads what another one writes; or devices are of several kinds
            and the model has several backbones, or `objective` is given.
    """
    check_given(num_stages=num_stages, num_microbatches=num_microbatches, cuts=cuts)
    _check_sizes(world_size, batch_size, probability)
    filler = filler_of(fill)
    mixed = bool(profile.kinds)
    if mixed or "auto" in (num_stages, num_microbatches) or objective != "simulated":
        if num_microbatches is None and num_stages != "auto" and not mixed:
            num_microbatches = _usual_microbatches(num_stages or world_size, batch_size)
        _check_microbatches(num_microbatches, world_size, batch_size)
        space = space_of(num_stages, num_microbatches, world_size, cuts, mixed=mixed)
        space = replace(
            space,
            schedules=(schedule,),
            fill=fill,
            probability=probability,
            objective=objective,
            network=network,
            margin=margin,
        )
        found = (search_mixed if mixed else search)(
            profile, world_size=world_size, batch_size=batch_size, space=space, progress=progress
        )
        log.info(
            "simulated %d plans: iteration %.2f ms; none of the space ends before %.2f ms",
            found.num_plans, found.expected_us / 1e3, found.bound_us / 1e3,
        )  # fmt: skip
        return replace(found.plan, origin=origin_of(profile))
    assert num_stages != "auto"
    assert num_microbatches != "auto"
    if num_stages is None:
        num_stages = world_size if cuts is None else num_stages_of(cuts)
    plan = _fixed_plan(
        profile, world_size, batch_size, num_stages, num_microbatches, schedule, cuts
    )
    if network is not None:
        return network.place(plan, profile, filler=filler, probability=probability)[0]
    return plan if filler is None else with_fills(plan, profile, fill=filler)


def check_given(*, num_stages: object, num_microbatches: object, cuts: object) -> None:
    """Refuse what a user may have written and no model could make right.

    Raises:
        PlanError: Something is no number, or none that counts.
    """
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value is not None and value != "auto" and not _is_whole(value):
            raise PlanError(f'{name}={value!r}; give a whole number, "auto", or leave it out')
    for own in cuts.values() if isinstance(cuts, Mapping) else (() if cuts is None else (cuts,)):
        if isinstance(own, str) or not (isinstance(own, Sequence) and all(map(_is_whole, own))):
            raise PlanError(
                f"cuts={cuts!r}; give the first layer of every stage but the first, as in [3, 7], "
                "by backbone if there are several"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(world_size: int, batch_size: int, probability: float) -> None:
    if world_size < 1 or batch_size < 1:
        raise PlanError(
            f"a plan for {world_size} ranks with {batch_size} samples each; give at least 1 of both"
        )
    if not 0 <= probability <= 1:
        raise PlanError(f"probability={probability} of self-conditioning; give one in [0, 1]")


def _check_microbatches(given: int | Auto | None, world_size: int, batch_size: int) -> None:
    """Refuse what no pipeline of this world can have."""
    most = world_size * batch_size
    if isinstance(given, int) and not 1 <= given <= most:
        raise PlanError(
            f"num_microbatches={given}, but all {world_size} ranks together have {most} samples "
            f"({batch_size} each); choose 1 <= num_microbatches <= {most}, or a larger batch"
        )


def _fixed_plan(
    profile: Profile,
    world_size: int,
    batch_size: int,
    num_stages: int,
    num_microbatches: int | None,
    schedule: str,
    cuts: Cuts | None,
) -> Plan:
    """One device a stage of each backbone, without fills."""
    groups = default_groups(world_size, num_stages)
    group_batch = batch_size * num_stages
    if num_microbatches is None:
        num_microbatches = _usual_microbatches(num_stages, batch_size)
    if not 1 <= num_microbatches <= group_batch:
        raise PlanError(
            f"num_microbatches={num_microbatches} for a pipeline's batch of {group_batch} samples "
            f"({batch_size} per device x {num_stages} devices); "
            f"choose 1 <= num_microbatches <= {group_batch}, or a larger batch"
        )
    samples = max(split_sizes(group_batch, num_microbatches))
    plan = Plan(
        graph_digest=digest(profile.graph),
        profile_digest=digest(profile),
        groups=groups,
        stages=_stages(profile, num_stages, samples, cuts),
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        schedule=schedule,
        origin=origin_of(profile),
    )
    schedule_of(plan)  # an unknown schedule is refused now, not when the plan is first used
    return with_lengths(plan, profile)


def _usual_microbatches(num_stages: int, batch_size: int) -> int:
    return max(1, min(MICROBATCHES_PER_STAGE * num_stages, batch_size * num_stages))


def space_of(
    num_stages: int | Auto | None,
    num_microbatches: int | Auto | None,
    world_size: int,
    cuts: Cuts | None = None,
    *,
    mixed: bool = False,
) -> Space:
    """What "auto" leaves to the search.

    Raises:
        PlanError: `cuts` fix what the search would choose.
    """
    if cuts is not None:
        given = dict(cuts) if isinstance(cuts, Mapping) else tuple(cuts)
        by = '"auto" or another objective'
        remedy = "give num_microbatches as a number and no objective, or no cuts"
        if mixed:
            by, remedy = "the speeds of several kinds of devices", "give no cuts"
        raise PlanError(f"cuts={given} fix the stages, which {by} would choose; {remedy}")
    fixed = num_microbatches if isinstance(num_microbatches, int) else None
    if num_stages == "auto":
        return Space(num_microbatches=fixed)
    num_stages = world_size if num_stages is None else num_stages
    if mixed:
        return Space(num_stages=num_stages, num_microbatches=fixed)
    return Space(num_stages=num_stages, group_devices=num_stages, num_microbatches=fixed)


def _stages(
    profile: Profile, num_stages: int, samples: int, cuts: Cuts | None
) -> tuple[Stage, ...]:
    """Stage i on device i; with several backbones every other one from the last device up."""
    backbones = profile.graph.backbones
    if cuts is not None and not isinstance(cuts, Mapping):
        if len(backbones) > 1:
            names = ", ".join(c.name for c in backbones)
            raise PlanError(
                f"cuts={tuple(cuts)} for a model with {len(backbones)} backbones ({names}); give "
                "a mapping from backbone name to its cuts"
            )
        cuts = {backbones[0].name: cuts}
    return opposite_stages(profile, num_stages=num_stages, samples=samples, cuts=cuts)

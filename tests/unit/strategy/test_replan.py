"""New fills from measured times: the decision, the switch on several ranks, and the way back."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.op import Op, OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.core.timeline import Timeline
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.planning.search import make_plan, schedule_of
from lightning_dpipe.planning.variants import expected_us, with_fills
from lightning_dpipe.profiling.calibrate import calibrate, scaled
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.runtime.trace import Record, StepTrace
from lightning_dpipe.simulation.simulate import simulate
from lightning_dpipe.strategy.replan import TRACED_STEPS, Phase, Replanner, propose, replanner_of
from pipeline import make_plan as plan_with_cuts
from pipeline import open_session
from ranks import run_threads
from small import small_batch, small_unet
from synthetic import FrozenChain, model_profile
from thread_link import Joint, ThreadLink

FROZEN = (
    FrozenChain(name="text", forward_us=(120, 120, 120)),
    FrozenChain(name="vae", forward_us=(90, 270)),
)
PROFILE = model_profile([100] * 8, frozen=FROZEN, overhead_us=50)


def slower(profile: Profile, name: str, factor: float) -> Profile:
    """The profile with a component slower."""
    costs = tuple(
        scaled(c, 0, len(c.layers), factor, factor) if c.name == name else c for c in profile.costs
    )
    return replace(profile, costs=costs)


def plan_for(profile: Profile, *, world_size: int = 4, num_stages: int = 2) -> Plan:
    return make_plan(
        profile,
        world_size=world_size,
        batch_size=4,
        num_stages=num_stages,
        num_microbatches=4,
    )


def step_of(plan: Plan, truth: Profile) -> Timeline:
    """What a step takes under the true costs."""
    return simulate(plan, schedule_of(plan), truth)


def test_new_fills_are_faster_under_the_costs_that_were_measured() -> None:
    truth = slower(PROFILE, "text", 3.0)
    plan = plan_for(PROFILE)
    found = propose(plan, PROFILE, [step_of(plan, truth)] * 3)
    assert found is not None
    assert found.gain > 0.01
    assert expected_us(found.plan, truth) < expected_us(plan, truth) * (1 - found.gain / 2)
    assert replace(found.plan, fills=plan.fills, profile_digest=plan.profile_digest) == plan
    assert found.plan.profile_digest == digest(found.profile)
    assert found.profile.overhead_us == PROFILE.overhead_us


def test_one_layer_that_got_slow_is_told_from_its_neighbours() -> None:
    plan = plan_for(PROFILE)
    pieces = (replace(f, start=i, stop=i + 1) for f in plan.fills for i in range(f.start, f.stop))
    plan = replace(plan, fills=tuple(pieces))
    costs = tuple(scaled(c, 1, 2, 6.0, 1.0) if c.name == "text" else c for c in PROFILE.costs)
    truth = replace(PROFILE, costs=costs)
    learnt = calibrate(PROFILE, plan, [step_of(plan, truth)])
    for name in ("text", "vae"):
        assert learnt.component(name) == truth.component(name)


def test_the_decision_follows_from_plan_profile_and_timelines_alone() -> None:
    truth = slower(PROFILE, "vae", 3.0)
    plan = plan_for(PROFILE)
    timelines = [step_of(plan, truth)] * 3
    assert propose(plan, PROFILE, timelines) == propose(plan, PROFILE, list(timelines))


def test_costs_that_hold_leave_the_fills_as_they_are() -> None:
    plan = plan_for(PROFILE)
    assert propose(plan, PROFILE, [step_of(plan, PROFILE)] * 3) is None


@dataclass
class Run:
    """What one rank saw: plan in use at each step, and what was logged after which."""

    plans: list[Plan]
    rows: dict[int, dict[str, float]]
    settled: Plan


def run(
    plan: Plan, truth: Callable[[int, Plan], Profile], *, steps: int, every: int = 5
) -> list[Run]:
    """Steps on thread ranks that take what `truth` says, each rank with a replanner of its own."""
    joint = Joint(plan.world_size)

    def work(rank: int, _: ThreadHub) -> Run:
        in_use = [plan]
        replanner = Replanner(
            every_n_steps=every,
            plan=plan,
            profile=PROFILE,
            link=ThreadLink(rank, joint),
            adopt=lambda new, _: in_use.append(new),
        )
        seen = Run([], {}, plan)
        _, device = plan.locate(rank)
        for step in range(steps):
            current = in_use[-1]
            seen.plans.append(current)
            if replanner.wants(steady=step % 8 != 7, self_conditioned=False):
                timeline = step_of(current, truth(step, current))
                records = [
                    Record(s.start_us * 1000, s.end_us * 1000, s.activity, s.label, s.op)
                    for s in timeline.spans
                    if s.device == device
                ]
                rows = replanner.traced(
                    StepTrace(
                        device=device, rank=rank, end_ns=timeline.end_us * 1000, records=records
                    )
                )
                if rows:
                    seen.rows[step] = dict(rows)
        seen.settled = replanner.settled
        return seen

    return run_threads(work, plan.world_size)


def test_a_layer_that_gets_slow_in_mid_run_gets_other_fills_on_all_ranks_at_once() -> None:
    plan = plan_for(PROFILE)
    slow = slower(PROFILE, "text", 3.0)
    seen = run(plan, lambda step, _: PROFILE if step < 10 else slow, steps=40)
    assert all(other == seen[0] for other in seen)
    first = seen[0]
    switched = next(i for i, p in enumerate(first.plans) if p.fills != plan.fills)
    assert switched >= 10 + TRACED_STEPS
    (row,) = first.rows.values()
    assert row["replan/kept"] == 1
    assert row["replan/predicted_gain"] > 0.01
    assert row["replan/after_s"] < row["replan/before_s"] * (1 - row["replan/predicted_gain"] / 2)
    assert first.settled.fills == first.plans[-1].fills == first.plans[switched].fills


def test_nothing_happens_while_costs_are_as_profiled() -> None:
    plan = plan_for(PROFILE)
    for seen in run(plan, lambda step, _: PROFILE, steps=30):
        assert seen.plans == [plan] * 30
        assert not seen.rows


def test_fills_that_turn_out_slower_go_again_and_are_not_tried_twice() -> None:
    plan = plan_for(PROFILE)
    slow = slower(PROFILE, "text", 3.0)
    worse = slower(slow, "net", 2.0)

    def truth(_: int, current: Plan) -> Profile:
        return slow if current.fills == plan.fills else worse

    for seen in run(plan, truth, steps=60):
        (row,) = seen.rows.values()
        assert row["replan/kept"] == 0
        assert row["replan/after_s"] > row["replan/before_s"]
        assert seen.settled == plan
        assert seen.plans[-1] == plan
        assert {p.fills for p in seen.plans} > {plan.fills}


def test_unsteady_and_differently_conditioned_steps_are_not_traced() -> None:
    plan = plan_for(PROFILE)
    replanner = Replanner(
        every_n_steps=1,
        plan=plan,
        profile=PROFILE,
        link=ThreadLink(0, Joint(1)),
        adopt=lambda *_: None,
    )
    assert not replanner.wants(steady=True, self_conditioned=False)  # the next one is
    assert replanner.phase is Phase.MEASURE
    assert not replanner.wants(steady=False, self_conditioned=False)
    assert replanner.wants(steady=True, self_conditioned=True)
    assert not replanner.wants(steady=True, self_conditioned=False)
    assert replanner.wants(steady=True, self_conditioned=True)


def test_an_interval_below_1_is_refused_and_one_without_fills_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, link = plan_for(PROFILE), ThreadLink(0, Joint(1))
    options: dict[str, Any] = {"profile": PROFILE, "link": link, "adopt": lambda *_: None}
    with pytest.raises(PlanError, match="replan_every_n_steps=0"):
        replanner_of(0, plan=plan, **options)
    assert replanner_of(None, plan=plan, **options) is None
    assert replanner_of(5, plan=replace(plan, fills=()), **options) is None
    assert "replan_every_n_steps=5 does nothing" in caplog.text


# ---- the switch in real sessions


def late(plan: Plan) -> Plan:
    """The same fills, all after the last op."""
    last = {
        d: Op(stage=s, kind=OpKind.B, microbatch=plan.num_microbatches - 1)
        for s, stage in enumerate(plan.stages)
        for d in stage.devices
    }
    return replace(plan, fills=tuple(replace(f, after=last[f.device]) for f in plan.fills))


def filled_plan() -> tuple[Any, Plan]:
    graph = trace(small_unet())
    plan = plan_with_cuts(graph, (4,), num_microbatches=3, batch_size=3)
    flat = model_profile(
        [100] * 9,
        frozen=(
            FrozenChain(name="text", forward_us=(40,) * 3),
            FrozenChain(name="noise", forward_us=(20,)),
        ),
    )
    return graph, with_fills(plan, replace(flat, graph=graph))


def losses_and_gradients(switches: dict[int, Plan], plan: Plan, graph: Any) -> list[Any]:
    """Six filled steps on two thread ranks, with the fills of ``switches[i]`` from step i on."""
    hub, base = ThreadHub(2), small_unet()  # made once: its seed is global, threads are not alone
    batches = [[small_batch(3, 10 * step + rank) for rank in range(2)] for step in range(6)]

    def work(rank: int, _: ThreadHub) -> Any:
        session = open_session(copy.deepcopy(base), graph, plan, rank, hub.transport(rank), None)
        losses = []
        for step, batch in enumerate(batches):
            if step in switches:
                session.refill(switches[step])
            last = step + 1 == len(batches)
            result = session.step(
                batch[rank],
                sizes=(3, 3),
                batch_index=step,
                loss_scale=1 / 6,
                next_batch=None if last else batches[step + 1][rank],
                next_sizes=None if last else (3, 3),
            )
            losses.append({k: v.clone() for k, v in result.loss_sum.items()})
        gradients = [p.grad for s in session.stages.values() for p in s.parameters]
        return losses, gradients

    return run_threads(work, 2, hub=hub)


def test_a_switch_between_two_steps_changes_no_bit() -> None:
    graph, plan = filled_plan()
    assert late(plan).fills != plan.fills
    plain = losses_and_gradients({}, plan, graph)
    switched = losses_and_gradients({2: late(plan), 4: plan}, plan, graph)
    for (losses, gradients), (others, other_gradients) in zip(plain, switched, strict=True):
        for a, b in zip(losses, others, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
        for g, h in zip(gradients, other_gradients, strict=True):
            assert (g is None and h is None) or torch.equal(g, h)


def test_only_fills_may_change_in_a_session() -> None:
    graph, plan = filled_plan()
    hub = ThreadHub(2)

    def work(rank: int, _: ThreadHub) -> None:
        session = open_session(small_unet(), graph, plan, rank, hub.transport(rank), None)
        with pytest.raises(PlanError, match="in more than its fills"):
            session.refill(replace(plan, num_microbatches=2))

    run_threads(work, 2, hub=hub)

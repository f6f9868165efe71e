"""Devices of several kinds in the simulator: each takes its own times, by hand."""

from dataclasses import replace

import pytest

from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.fleet import fleet
from lightning_dpipe.core.plan import Plan, Stage
from lightning_dpipe.core.timeline import Activity
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.variants import with_fills
from lightning_dpipe.simulation.memory import peak_bytes
from lightning_dpipe.simulation.simulate import simulate
from synthetic import FrozenChain, model_profile

TEXT = (FrozenChain(name="text", forward_us=(7,)),)


def profile_of(factor: int):
    return model_profile(
        [10 * factor, 20 * factor],
        frozen=tuple(replace(c, forward_us=(7 * factor,)) for c in TEXT),
        width=0,
        trained_bytes=0,
        optimizer_us=3 * factor,
    )


BOTH = fleet([profile_of(1), profile_of(2)], (0, 1))


def plan(*stages: Stage, groups=((0, 1),), num_microbatches: int = 1) -> Plan:
    return Plan(
        graph_digest="", profile_digest="", groups=groups, stages=stages,
        num_microbatches=num_microbatches, batch_size=6, schedule="1f1b",
    )  # fmt: skip


def ends(made: Plan) -> dict[int, int]:
    """Last end of forward, backward and frozen work of each device."""
    timeline = simulate(made, schedule_of(made), BOTH)
    busy = (Activity.FORWARD, Activity.BACKWARD, Activity.FROZEN)
    return {
        d: max(s.end_us for s in timeline.spans if s.device == d and s.activity in busy)
        for d in (0, 1)
    }


@pytest.mark.parametrize(("shares", "rows"), [((), (6, 6)), ((2, 1), (8, 4)), ((1, 3), (3, 9))])
def test_replicas_take_their_own_times_for_their_own_rows(shares, rows) -> None:
    whole = plan(Stage(backbone="net", start=0, stop=2, devices=(0, 1), shares=shares))
    # Up front each encodes its 6 samples, then waits for the other's: 2 x 42 us.
    assert ends(whole) == {0: 84 + 90 * rows[0], 1: 84 + 180 * rows[1]}
    filled = with_fills(whole, BOTH)
    assert ends(filled) == {0: 90 * rows[0] + 42, 1: 180 * rows[1] + 84}


def test_stages_on_other_kinds_take_other_times() -> None:
    first = Stage(backbone="net", start=0, stop=1, devices=(0,))
    last = Stage(backbone="net", start=1, stop=2, devices=(1,))
    there = simulate(p := plan(first, last), schedule_of(p), BOTH)
    back = simulate(p := plan(first, last, groups=((1, 0),)), schedule_of(p), BOTH)
    # 84 of encoding; then F, F, B, B of 12 samples; then the optimizer of the first stage.
    assert there.end_us == 84 + 12 * (10 + 40 + 80 + 20) + 3
    assert back.end_us == 84 + 12 * (20 + 20 + 40 + 40) + 6


def test_activations_follow_the_shares() -> None:
    stage = Stage(backbone="net", start=0, stop=2, devices=(0, 1), shares=(1, 3))
    profile = fleet([model_profile([1, 1]), model_profile([2, 2])], (0, 1))
    made = plan(stage, num_microbatches=2)
    held = peak_bytes(made, schedule_of(made), profile)
    # 32 bytes a sample and layer, micro-batches of 6 rows split 2 : 4 (1.5 : 4.5, largest
    # remainders, the earlier first).
    assert held[1] - held[0] == 2 * 32 * (4 - 2)


def test_groups_of_unequal_speed_are_refused() -> None:
    made = plan(Stage(backbone="net", start=0, stop=2, devices=(0,)), groups=((0,), (1,)))
    with pytest.raises(PlanError, match="one would wait for the other"):
        simulate(made, schedule_of(made), BOTH)

import pytest

from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules.one_f_one_b import one_f_one_b


def test_warmup_steady_cooldown_as_drawn_in_the_paper() -> None:
    assert one_f_one_b(3, 4) == Schedule.parse(
        """
        device 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        device 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        device 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
        """
    )


def test_fewer_microbatches_than_stages_leave_early_stages_without_a_steady_part() -> None:
    assert one_f_one_b(3, 1) == Schedule.parse("0F0 0B0\n1F0 1B0\n2F0 2B0")
    assert one_f_one_b(4, 2) == Schedule.parse(
        "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1\n3F0 3B0 3F1 3B1"
    )


def test_self_conditioned_runs_the_whole_forward_sweep_first() -> None:
    assert one_f_one_b(2, 2, True) == Schedule.parse(
        """
        device 0: 0S0 0S1 0F0 0F1 0B0 0B1
        device 1: 1S0 1S1 1F0 1B0 1F1 1B1
        """
    )


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_stage_i_never_holds_more_than_s_minus_i_activations(
    num_stages: int, num_microbatches: int
) -> None:
    for stage, order in enumerate(one_f_one_b(num_stages, num_microbatches).orders):
        alive, most = 0, 0
        for op in order:
            alive += 1 if op.kind is OpKind.F else -1
            most = max(most, alive)
        assert alive == 0
        assert most == min(num_stages - stage, num_microbatches)

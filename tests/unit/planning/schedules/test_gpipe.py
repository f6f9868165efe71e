from lightning_dpipe.core.schedule import Schedule
from lightning_dpipe.planning.schedules.gpipe import gpipe


def test_all_forwards_come_before_all_backwards_both_ascending() -> None:
    assert gpipe(2, 3) == Schedule.parse(
        """
        device 0: 0F0 0F1 0F2 0B0 0B1 0B2
        device 1: 1F0 1F1 1F2 1B0 1B1 1B2
        """
    )


def test_self_conditioned_runs_the_whole_forward_sweep_first() -> None:
    assert gpipe(2, 2, True) == Schedule.parse(
        """
        device 0: 0S0 0S1 0F0 0F1 0B0 0B1
        device 1: 1S0 1S1 1F0 1F1 1B0 1B1
        """
    )

"""Matrices of stage costs against the profile, entry by entry."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_dpipe.planning.stage_costs import BackboneCosts, Cutting
from synthetic import model_profile

SIZES = (5, 4, 4)


def cutting(**options: object) -> Cutting:
    return replace(
        Cutting(sizes=SIZES, num_devices=4, num_groups=3, schedule="1f1b"),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("conditioned", [False, True])
def test_times_are_those_of_the_first_replica(replicas: int, conditioned: bool) -> None:
    profile = model_profile([3, 1, 4, 1], [5, 9, 2, 6], optimizer_us=7, trained_bytes=1000)
    table = BackboneCosts(profile, "net").table(
        cutting(self_conditioned=conditioned), replicas=replicas, from_back=1
    )
    rows = [-(-size // replicas) for size in SIZES]
    forwards = 2 if conditioned else 1
    n = 3 * replicas
    for start in range(4):
        for stop in range(start + 1, 5):
            span = ("net", start, stop)
            assert table.work[start, stop] == sum(
                forwards * profile.forward_us(*span, r) + profile.backward_us(*span, r)
                for r in rows
            )
            assert table.first[start, stop] == profile.forward_us(*span, rows[0])
            assert table.last[start, stop] == profile.backward_us(*span, rows[-1])
            assert table.step[start, stop] == 7 * (stop - start)
            num_bytes = -(-2 * (n - 1) * 1000 * (stop - start) // n)
            assert table.sync[start, stop] == profile.allreduce.transfer_us(num_bytes)
    assert np.isinf(table.work[np.tril_indices(5)]).all()


def test_stages_recompute_where_they_do_not_fit_and_are_left_out_where_nothing_helps() -> None:
    # Per layer 4000 bytes of weights and their state, 32 bytes a sample of activations.
    profile = model_profile([1] * 4, trained_bytes=1000)
    costs = BackboneCosts(profile, "net")
    plain = cutting(sizes=(4, 4, 4))
    # First of 3 stages: 3 micro-batches in flight. Two layers: 8000 + 3 x 2 x 128 = 8768 bytes;
    # recomputed: inputs of 3 (32 bytes a sample: 384) + one micro-batch of two layers: 8640.
    for memory, fits, again in ((8768, True, False), (8767, True, True), (8639, False, True)):
        table = costs.table(replace(plain, memory_bytes=memory), replicas=1, from_back=3)
        assert np.isfinite(table.work[1, 3]) == fits
        assert table.recompute[1, 3] == again
    free = costs.table(plain, replicas=1, from_back=3)
    paid = costs.table(replace(plain, memory_bytes=8767), replicas=1, from_back=3)
    assert paid.work[1, 3] - free.work[1, 3] == 3 * profile.forward_us("net", 1, 3, 4)

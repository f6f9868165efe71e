import random

import pytest

from lightning_dpipe.core.profile import Link
from lightning_dpipe.core.program import StepShape
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.search import make_plan
from lightning_dpipe.simulation.clock import Clock
from lightning_dpipe.simulation.tasks import task_graph
from synthetic import model_profile


@pytest.mark.parametrize("sync_us", [0, 300])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(5))
def test_an_op_that_starts_at_its_latest_start_and_no_later_keeps_the_end(
    seed: int, schedule: str, sync_us: int
) -> None:
    rng = random.Random(seed)
    profile = model_profile(
        [rng.randint(1, 60) for _ in range(6)],
        skips=((0, 5), (1, 4)),
        width=0,
        p2p=Link(latency_us=rng.randint(0, 40), bytes_per_s=10**9, host_us=3),
        allreduce=Link(latency_us=sync_us, bytes_per_s=10**15),
        optimizer_us=20,
    )
    plan = make_plan(
        profile,
        world_size=6,
        num_stages=3,
        batch_size=4,
        num_microbatches=5,
        schedule=schedule,
    )
    shape = StepShape(sizes=(4, 4, 4), encoded=True)
    graph = task_graph(plan, schedule_of(plan), profile, shape)

    def end_us(delayed: int | None = None, until_us: int = 0) -> int:
        clock = Clock(graph)
        for i, task in enumerate(graph.tasks):
            if i == delayed:
                clock.free_us[task.device] = max(clock.free_us[task.device], until_us)
            clock.run(task)
        return clock.end_us()

    end = end_us()
    assert end == max(graph.path_us)
    for i, path_us in enumerate(graph.path_us):
        assert end_us(i, end - path_us) == end
        assert end_us(i, end - path_us + 1) == end + 1

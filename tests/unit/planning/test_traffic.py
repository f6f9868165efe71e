"""Bytes on the links against the messages of the programs that really run."""

import math
import random
from dataclasses import replace

import pytest
from brute import all_stages, plan_with

from lightning_dpipe.core.graph import DTYPE_BYTES
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.program import Lane, Message, Send, SendRows
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.planning.traffic import traffic
from lightning_dpipe.simulation.simulate import steady_shape
from synthetic import FrozenChain, model_graph


def sent(plan: Plan, graph: object, lane: Lane) -> dict[tuple[int, int], int]:
    """(source device, target device) -> bytes of one step, out of the lowered programs."""
    schedule = schedule_of(plan)
    shape = replace(steady_shape(plan, schedule), next_sizes=None, encoded=False)
    found: dict[tuple[int, int], int] = {}
    at = {rank: device for device, rank in enumerate(plan.groups[0])}
    for program in lower(plan, schedule, graph, shape):  # type: ignore[arg-type]
        for instruction in program.instructions:
            if isinstance(instruction, Send | SendRows):
                message: Message = instruction.message
                if message.channel.lane is lane:
                    edge = (at[message.channel.source], at[message.channel.target])
                    size = math.prod(message.shape) * DTYPE_BYTES[message.dtype]
                    found[edge] = found.get(edge, 0) + size
    return found


@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_those_of_the_programs(seed: int) -> None:
    rng = random.Random(seed)
    graph = model_graph(
        5,
        skips=rng.sample([(0, 3), (1, 4), (0, 4), (2, 4)], 2),
        frozen=(FrozenChain(name="text", forward_us=(1,)),),
    )
    microbatches, num_stages = rng.choice([1, 2, 4]), rng.choice([2, 3])
    stages = rng.choice(list(all_stages(5, num_stages, 4)))
    plan = plan_with(stages, num_groups=1, batch_size=4, num_microbatches=microbatches)
    found = traffic(plan, graph)
    pipeline, rows = sent(plan, graph, Lane.PIPELINE), sent(plan, graph, Lane.ROWS)
    for device, t in enumerate(found):
        out = sum(n for (a, _), n in pipeline.items() if a == device)
        into = sum(n for (_, b), n in pipeline.items() if b == device)
        assert (t.sent_bytes * microbatches, t.received_bytes * microbatches) == (out, into)
        assert t.rows_in_bytes == sum(n for (_, b), n in rows.items() if b == device)
        assert t.rows_out_bytes == sum(n for (a, _), n in rows.items() if a == device)

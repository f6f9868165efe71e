"""The best possible filling of a small pipeline, by mixed-integer programming (SciPy's HiGHS).

Free are the number of samples of each frozen layer in each slot between two ops of a device, when
every op starts and, with `move`, how many of whose samples each device encodes. Exact for layers
that cost ``fixed + n * per_sample`` and for links without contention (values of no bytes).
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from lightning_dpipe.core.op import OpKind
from lightning_dpipe.core.plan import Plan
from lightning_dpipe.core.profile import Profile
from lightning_dpipe.planning.backlog import FrozenCosts
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.simulation.simulate import steady_shape
from lightning_dpipe.simulation.tasks import task_graph


class _Program:
    """Rows ``sum(coefficient * variable) >= limit`` over numbered variables."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.rows: list[tuple[dict[int, float], float]] = []

    def variable(self, upper: float = np.inf, *, integer: bool = False) -> int:
        self.upper.append(upper)
        self.integer.append(int(integer))
        return len(self.upper) - 1

    def at_least(self, terms: dict[int, float], limit: float) -> None:
        self.rows.append((terms, limit))

    def minimise(self, variable: int, gap: float) -> float:
        n = len(self.upper)
        matrix = np.zeros((len(self.rows), n))
        for i, (terms, _) in enumerate(self.rows):
            for j, value in terms.items():
                matrix[i, j] += value
        objective = np.zeros(n)
        objective[variable] = 1
        found = milp(
            objective,
            constraints=LinearConstraint(matrix, lb=np.array([limit for _, limit in self.rows])),
            integrality=np.array(self.integer),
            bounds=Bounds(0, np.array(self.upper)),
            options={"mip_rel_gap": gap, "time_limit": 20},
        )
        assert found.success, found.message
        return float(found.fun)


def exact_end_us(plan: Plan, profile: Profile, *, gap: float = 1e-3, move: bool = False) -> float:
    """End of the iteration under the best placement of all frozen work, to a relative `gap`."""
    schedule, program = schedule_of(plan), _Program()
    work = FrozenCosts.of(profile, samples=plan.batch_size)
    shape = replace(steady_shape(plan, schedule), encoded=True, next_sizes=None)
    graph = task_graph(plan, schedule, profile, shape)
    end = program.variable()
    starts = [program.variable() for _ in graph.tasks]
    slots = {
        d: [dict[int, float]() for _ in range(1 + sum(t.device == d for t in graph.tasks))]
        for d in range(plan.num_devices)
    }
    for owner in range(plan.num_devices):
        takers = range(plan.num_devices) if move else (owner,)
        counts = {d: program.variable(work.samples, integer=True) for d in takers}
        program.at_least(dict.fromkeys(counts.values(), 1.0), work.samples)
        for d, count in counts.items():
            for merged, terms in zip(
                slots[d], _slots(program, work, len(slots[d]), count), strict=True
            ):
                merged.update(terms)
    sender: dict[int, tuple[int, int]] = {}
    for i, task in enumerate(graph.tasks):
        for transfer, offset_us in task.sends:
            wire = graph.transfers[transfer]
            sender[transfer] = (i, offset_us + wire.wire_us + wire.latency_us)
    mine: dict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(graph.tasks):
        d = task.device
        fills = slots[d][len(mine[d])]
        before = {starts[mine[d][-1]]: -1.0} if mine[d] else {}
        length_us = graph.tasks[mine[d][-1]].length_us if mine[d] else 0
        program.at_least({starts[i]: 1.0, **before, **fills}, length_us)
        for transfer in task.waits:
            j, delay_us = sender[transfer]
            program.at_least({starts[i]: 1.0, starts[j]: -1.0}, delay_us)
        if task.op is not None and task.op.kind in (OpKind.B, OpKind.W):
            after_us = graph.sync_us[task.op.stage] + graph.optimizer_us[d]
            program.at_least({end: 1.0, starts[i]: -1.0}, task.length_us + after_us)
        mine[d].append(i)
    for d, tasks in mine.items():
        last_us = graph.tasks[tasks[-1]].length_us + graph.optimizer_us[d]
        program.at_least({end: 1.0, starts[tasks[-1]]: -1.0, **slots[d][-1]}, last_us)
    return program.minimise(end, gap) + graph.overhead_us


def _slots(
    program: _Program, work: FrozenCosts, num_slots: int, count: int
) -> list[dict[int, float]]:
    """What a device does of `count` samples; per slot the terms that subtract its time."""
    b = work.samples
    samples = [[program.variable(b, integer=True) for _ in work.layers] for _ in range(num_slots)]
    terms: list[dict[int, float]] = [{} for _ in range(num_slots)]
    for i, layer in enumerate(work.layers):
        per_sample = work.cost_us(i, 2) - work.cost_us(i, 1)
        fixed = work.cost_us(i, 1) - per_sample
        for k in range(num_slots):
            x = samples[k][i]
            terms[k][x] = -per_sample
            if fixed:
                begun = program.variable(1, integer=True)
                program.at_least({begun: b, x: -1.0}, 0)
                terms[k][begun] = -fixed
            for p in layer.before:
                so_far = {samples[j][p]: 1.0 for j in range(k + 1)}
                program.at_least({**so_far, **{samples[j][i]: -1.0 for j in range(k + 1)}}, 0)
        program.at_least({**{samples[k][i]: 1.0 for k in range(num_slots)}, count: -1.0}, 0)
    return terms

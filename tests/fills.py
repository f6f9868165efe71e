"""Fills placed at random, to show that no placement changes a number."""

import random

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.planning.schedules.of_plan import schedule_of


def some_fills(plan: Plan, graph: ModelGraph, draw: random.Random) -> tuple[Fill, ...]:
    """Every frozen layer on all rows of every device, in two parts, after random ops."""
    fills = []
    for variant in (False, True) if graph.feedback is not None else (False,):
        for device, order in enumerate(schedule_of(plan, self_conditioned=variant).orders):
            places: list[Op | None] = [None, *order]
            pieces = [
                (component.name, layer, rows)
                for component in graph.frozen
                for layer in range(len(component.layers))
                for rows in ((0, 1), (1, plan.batch_size))
            ]
            spots = sorted(draw.randrange(len(places)) for _ in pieces)
            fills += [
                Fill(
                    device=device, after=places[at], component=name, start=layer, stop=layer + 1,
                    first=rows[0], last=rows[1], self_conditioned=variant,
                )
                for at, (name, layer, rows) in zip(spots, pieces, strict=True)
            ]  # fmt: skip
    return tuple(fills)

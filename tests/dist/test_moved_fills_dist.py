"""Two processes over gloo: a plan that moves samples trains as one that does not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_dpipe.core.jsonio import digest, dumps, from_data
from lightning_dpipe.core.op import Op
from lightning_dpipe.core.plan import Fill, Plan, Stage, default_groups
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.runtime.distributed import DistTransport
from lightning_dpipe.strategy.assemble import PipelineSession
from ranks import run_ranks
from toy import WIDTH, Toy

ROWS, STEPS = 6, 5


def plans() -> tuple[Plan, Plan]:
    """Device 0 encodes samples 2.. of device 1, in two pieces; and the same slices at home.

    The keys of its random draws travel with a sample, so both plans draw the same noise.
    """
    module = Toy()
    module.configure_model()
    graph = trace(module.pipeline_spec())
    layers = len(graph.backbones[0].layers)

    def put(device: int, after: str | None, first: int, last: int, owner: int) -> list[Fill]:
        return [
            Fill(device=device, after=None if after is None else Op.parse(after),
                 component=c.name, start=0, stop=len(c.layers), first=first, last=last,
                 owner=None if owner == device else owner)
            for c in graph.frozen
        ]  # fmt: skip

    home = Plan(
        graph_digest=digest(graph),
        profile_digest="",
        groups=default_groups(2, 2),
        stages=(
            Stage(backbone="mlp", start=0, stop=4, devices=(0,)),
            Stage(backbone="mlp", start=4, stop=layers, devices=(1,)),
        ),
        num_microbatches=3,
        batch_size=ROWS,
        schedule="1f1b",
        fills=(
            *put(0, "0F1", 0, 6, 0),
            *put(1, None, 0, 2, 1),
            *put(1, "1B0", 2, 4, 1),
            *put(1, "1B2", 4, 6, 1),
        ),
    )
    moved = (
        *put(0, None, 2, 4, 1),
        *put(0, "0F1", 0, 6, 0),
        *put(0, "0B1", 4, 6, 1),
        *put(1, None, 0, 2, 1),
    )
    return home, replace(home, fills=moved)


def train(rank: int, text: str) -> list[float]:
    """Losses of a few steps of SGD on this rank."""
    import json

    plan = from_data(Plan, json.loads(text))
    module = Toy()
    module.configure_model()
    spec = module.pipeline_spec()
    graph = trace(spec)
    device = torch.device("cpu")
    session = PipelineSession(
        graph=graph, binding=bind(spec, graph), plan=plan, rank=rank,
        transport=DistTransport(device), device=device, seed=3,
    )  # fmt: skip
    weights = [p for s in session.stages.values() for p in s.parameters]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        result = session.step(
            batch(step, rank), sizes=(ROWS, ROWS), batch_index=step, loss_scale=1 / (2 * ROWS),
            next_batch=batch(step + 1, rank), next_sizes=(ROWS, ROWS),
        )  # fmt: skip
        optimizer.step()
        losses.append(sum(float(x) for x in result.loss_sum.values()))
    session.close()
    return losses


def batch(step: int, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    slots = torch.arange(ROWS) * 2 + rank
    return {
        "image": torch.randn(ROWS, WIDTH, generator=generator),
        DRAW_KEY: torch.stack([torch.full_like(slots, step), slots], dim=1),
    }


@pytest.mark.dist
def test_moved_samples_leave_the_losses_of_two_processes_alone() -> None:
    home, moved = (run_ranks(train, 2, dumps(plan)) for plan in plans())
    assert moved == home, "the same slices and keys: bit for bit"
    last = home[0]  # rank 0 holds the last stage
    assert all(loss > 0 for loss in last)
    assert len(set(last)) == STEPS, "weights and batches change from step to step"

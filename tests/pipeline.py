"""Runs a spec over a thread hub as real sessions do, one thread per rank."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Fill, Plan, Stage, default_groups
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.runtime.reduce import Reducer, ThreadReduction
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.runtime.transport import Transport
from lightning_dpipe.strategy.assemble import PipelineSession
from ranks import run_threads


def make_plan(
    graph: ModelGraph,
    cuts: Sequence[int],
    *,
    num_microbatches: int,
    batch_size: int,
    schedule: str = "1f1b",
    groups: int = 1,
    replicas: Sequence[int] | None = None,
    shares: Sequence[tuple[int, ...]] | None = None,
    fills: tuple[Fill, ...] = (),
) -> Plan:
    """A plan with explicit cuts: stage i holds layers ``[cuts[i-1], cuts[i])``.

    ``replicas[i]`` devices of a group share stage i, by weights ``shares[i]``.
    """
    backbone = graph.backbones[0]
    borders = [0, *cuts, len(backbone.layers)]
    num_stages = len(borders) - 1
    counts = replicas or (1,) * num_stages
    homes = [tuple(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(num_stages)]
    num_devices = sum(counts)
    return Plan(
        graph_digest=digest(graph),
        profile_digest="test",
        groups=default_groups(num_devices * groups, num_devices),
        stages=tuple(
            Stage(
                backbone=backbone.name,
                start=borders[i],
                stop=borders[i + 1],
                devices=homes[i],
                shares=() if shares is None else shares[i],
            )
            for i in range(num_stages)
        ),
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        schedule=schedule,
        fills=fills,
    )


def opposite_plan(
    graph: ModelGraph,
    cuts: Sequence[Sequence[int]],
    *,
    num_microbatches: int,
    batch_size: int,
    schedule: str = "1f1b",
    groups: int = 1,
    replicas: int = 1,
    fills: tuple[Fill, ...] = (),
) -> Plan:
    """A plan for several backbones: the first down the devices, the second up, and so on.

    `cuts` are those of each backbone; every place of the pipeline is `replicas` devices.
    """
    places = [tuple(range(i, i + replicas)) for i in range(0, 10**3, replicas)]
    places = places[: len(cuts[0]) + 1]
    stages: list[Stage] = []
    for k, (backbone, own) in enumerate(zip(graph.backbones, cuts, strict=True)):
        borders = [0, *own, len(backbone.layers)]
        homes = places[: len(own) + 1] if k % 2 == 0 else places[::-1][: len(own) + 1]
        stages += [
            Stage(backbone=backbone.name, start=a, stop=b, devices=home)
            for a, b, home in zip(borders[:-1], borders[1:], homes, strict=True)
        ]
    num_devices = len(places) * replicas
    return Plan(
        graph_digest=digest(graph),
        profile_digest="test",
        groups=default_groups(num_devices * groups, num_devices),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        batch_size=batch_size,
        schedule=schedule,
        fills=fills,
        conditioned=None if graph.feedback is None else graph.feedback.backbone,
    )


@dataclass
class RankOutcome:
    """What one rank's run left."""

    loss_sums: list[float]
    spec: PipelineSpec
    parameters: list[nn.Parameter]


def open_session(
    spec: PipelineSpec,
    graph: ModelGraph,
    plan: Plan,
    rank: int,
    transport: Transport,
    reducer: Reducer | None,
) -> PipelineSession:
    """A session of one rank."""
    return PipelineSession(
        graph=graph,
        binding=bind(spec, graph),
        plan=plan,
        rank=rank,
        transport=transport,
        device=torch.device("cpu"),
        seed=7,
        reducer=reducer,
    )


def run_pipeline(
    make_spec: Callable[[], PipelineSpec],
    plan: Plan,
    batches: Sequence[Sequence[Mapping[str, Tensor]]],
    *,
    filled: bool = False,
    coins: Sequence[bool] | None = None,
    after_step: Callable[[int, RankOutcome], None] | None = None,
    accumulate: int = 1,
    training: bool = True,
    graph: ModelGraph | None = None,
) -> list[RankOutcome]:
    """Run ``batches[step][rank]`` on every rank; gradients are left in the parameters."""
    world = plan.world_size
    hub = ThreadHub(world)
    outcomes: list[Any] = [None] * world
    base = make_spec()
    graph = trace(base) if graph is None else graph
    reducers = {
        rank: reduction.reducer(i)
        for ranks in plan.replica_sets
        if len(ranks) > 1
        for reduction in [ThreadReduction(hub, len(ranks))]
        for i, rank in enumerate(ranks)
    }

    def work(rank: int) -> None:
        spec = copy.deepcopy(base)
        session = open_session(spec, graph, plan, rank, hub.transport(rank), reducers.get(rank))
        parameters = [p for s in session.stages.values() for p in s.parameters]
        outcome = outcomes[rank] = RankOutcome([], spec, parameters)
        for step, loss in enumerate(steps(session, batches, filled, coins, accumulate, training)):
            outcome.loss_sums.append(loss)
            if after_step is not None:
                after_step(step, outcome)

    run_threads(lambda rank, _: work(rank), world, hub=hub, timeout_s=120)
    return outcomes


def steps(
    session: PipelineSession,
    batches: Sequence[Sequence[Mapping[str, Tensor]]],
    filled: bool = False,
    coins: Sequence[bool] | None = None,
    accumulate: int = 1,
    training: bool = True,
) -> Iterator[float]:
    """Run one rank's share of ``batches[step][rank]``; yields the sum of its samples' losses."""
    rank, ranks = session.rank, session.plan.groups[session.group]
    for step, batch in enumerate(batches):
        following = batches[step + 1] if filled and step + 1 < len(batches) else None
        last = (step + 1) % accumulate == 0 or step + 1 == len(batches)
        result = session.step(
            batch[rank],
            sizes=tuple(_rows(batch[r]) for r in ranks),
            batch_index=step,
            loss_scale=1.0 / (sum(map(_rows, batch)) * accumulate),
            next_batch=None if following is None else following[rank],
            next_sizes=None if following is None else tuple(_rows(following[r]) for r in ranks),
            self_conditioned=bool(coins and coins[step]),
            training=training,
            reduce=last and training,
        )
        if last:
            session.wait_reduction()
        yield sum(float(x) for x in result.loss_sum.values())


def _rows(fields: Mapping[str, Tensor]) -> int:
    return len(next(iter(fields.values())))


def gather_gradients(plan: Plan, outcomes: Sequence[RankOutcome]) -> dict[str, Tensor | None]:
    """Gradient of every trained weight by backbone and layer, from group 0's ranks."""
    found: dict[str, Tensor | None] = {}
    for rank in plan.groups[0]:
        found |= own_gradients(plan, rank, outcomes[rank].spec)
    return found


def own_gradients(plan: Plan, rank: int, spec: PipelineSpec) -> dict[str, Tensor | None]:
    """Gradients of the weights that a rank trains, by backbone and layer."""
    found: dict[str, Tensor | None] = {}
    for index in plan.stages_on(plan.locate(rank)[1]):
        stage = plan.stages[index]
        for layer in spec.component(stage.backbone).layers[stage.start : stage.stop]:
            for i, p in enumerate(layer.parameters()):
                if p.requires_grad:
                    found[f"{stage.backbone}.{layer.name}.{i}"] = p.grad
    return found

"""A plan's whole world in this process: one thread a rank, the sessions that a Trainer drives.

In:     a planned module, each rank's batches.
Out:    loss and gradients by parameter name, from the first rank that holds each stage.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dpipe.core.plan import Plan
from lightning_dpipe.models.binding import bind
from lightning_dpipe.runtime.reduce import Reducer, ThreadReduction
from lightning_dpipe.runtime.threads import ThreadHub
from lightning_dpipe.strategy.assemble import PipelineSession
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.planned import Built

Fields = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Mean loss over the global batch, and the gradient of every trained parameter (or None)."""

    loss: float
    gradients: Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Replica:
    """A rank's way to sum gradients, and its weights: ranks with other stages share a module."""

    reducer: Reducer | None
    module: DiffusionModule


def run_threads(
    module: DiffusionModule,
    built: Built,
    batches: Sequence[Sequence[Fields]],
    *,
    device: torch.device,
    self_conditioned: bool,
) -> Outcome:
    """Run ``batches[step][rank]`` and return what the last step gave.

    Earlier steps encode the batch of the step after them in their bubbles, as training does; their
    gradients are dropped and no weight changes.

    Raises:
        Exception: Whatever a rank raised first.
    """
    plan = built.plan
    hub = ThreadHub(plan.world_size)
    replicas = {
        rank: _Replica(
            reduction.reducer(i) if len(ranks) > 1 else None, module if i == 0 else _copy(module)
        )
        for ranks in plan.replica_sets
        for reduction in [ThreadReduction(hub, len(ranks))]
        for i, rank in enumerate(ranks)
    }
    losses: list[float] = []
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            replica = replicas[rank]
            session = PipelineSession(
                graph=built.graph,
                binding=bind(replica.module.spec, built.graph),
                plan=plan,
                rank=rank,
                transport=hub.transport(rank),
                device=device,
                seed=module.seed,
                reducer=replica.reducer,
            )
            losses.append(_steps(session, plan, batches, self_conditioned))
        except BaseException as error:
            errors.append(error)
            hub.abort(error, rank)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(plan.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    count = sum(len(next(iter(fields.values()))) for fields in batches[-1])
    gradients = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    return Outcome(loss=sum(losses) / count, gradients=gradients)


def is_replicated(plan: Plan) -> bool:
    """Whether gradients are summed over ranks at all."""
    return any(len(ranks) > 1 for ranks in plan.replica_sets)


def _steps(
    session: PipelineSession,
    plan: Plan,
    batches: Sequence[Sequence[Fields]],
    self_conditioned: bool,
) -> float:
    """One rank's steps; returns the sum of the losses it computed in the last one."""
    ranks = plan.groups[session.group]
    sizes = [tuple(len(next(iter(batch[r].values()))) for r in ranks) for batch in batches]
    loss_sum = 0.0
    for step, batch in enumerate(batches):
        last = step + 1 == len(batches)
        total = sum(len(next(iter(fields.values()))) for fields in batch)
        result = session.step(
            batch[session.rank],
            sizes=sizes[step],
            batch_index=step,
            loss_scale=1.0 / total,
            next_batch=None if last else batches[step + 1][session.rank],
            next_sizes=None if last else sizes[step + 1],
            self_conditioned=self_conditioned,
            dropout=False,
        )
        session.wait_reduction()
        loss_sum = sum(float(x) for x in result.loss_sum.values())
        if not last:
            for stage in session.stages.values():
                for parameter in stage.parameters:
                    parameter.grad = None
    return loss_sum


def _copy(module: DiffusionModule) -> DiffusionModule:
    """A second model with the same weights. Layers call modules, so the spec is made anew."""
    module._spec, spec = None, module._spec
    second = copy.deepcopy(module)
    module._spec = spec
    second.prepare_spec()
    return second

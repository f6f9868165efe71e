"""One training or evaluation batch on the pipeline: fields, draw keys, sizes and the joint loss.

In:     the batch Lightning hands over, and the `Outlook` that the loader announced for it.
Out:    mean losses over the global batch, equal on all ranks; gradients in ``p.grad``.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.objective.draws import at_level
from lightning_dpipe.runtime.engine import StepResult
from lightning_dpipe.strategy.assemble import Groups, PipelineSession
from lightning_dpipe.strategy.local import Named, num_samples, select_fields
from lightning_dpipe.strategy.lookahead import Outlook, Outlooks
from lightning_dpipe.strategy.module import DiffusionModule
from lightning_dpipe.strategy.replan import Replanner


class StepRunner:
    """Feeds a session. `prepare` turns a raw next batch into what Lightning will hand over."""

    def __init__(
        self,
        module: DiffusionModule,
        session: PipelineSession,
        prepare: Callable[[Any], Any],
        outlooks: Outlooks,
    ) -> None:
        self.module = module
        self.session = session
        self.training = outlooks.training
        self.evaluation = outlooks.evaluation
        self.last: StepResult | None = None
        self.replanner: Replanner | None = None
        self.replanned: Mapping[str, float] = {}
        self._prepare = prepare
        self._promised: int | None = None
        self._evaluated: tuple[Named, Outlook, int] | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether the training batch that comes now has a successor to encode."""
        return bool(self.training) and self.training[0].next_sizes is not None

    def train(self, batch: Any, *, accumulate: int, reduce: bool) -> tuple[Named, int]:
        """Run one micro-step of an accumulation window.

        Returns:
            Mean loss by backbone, and the number of samples of the global batch.
        """
        outlook = _take(self.training)
        module, session = self.module, self.session
        fields, count = self._fields(batch, outlook)
        fields[DRAW_KEY] = module.training_keys(count)
        upcoming = None
        if outlook.next_sizes is not None:
            upcoming = select_fields(module.spec, self._prepare(outlook.next_batch))
            upcoming[DRAW_KEY] = module.training_keys(num_samples(upcoming), ahead=1)
        if self._promised != outlook.ticket:
            session.forget()
        self._promised = None  # until the step is through
        kept, upcoming_kept = self._kept(outlook)
        total = sum(outlook.sizes)
        conditioned = module.is_self_conditioned(module.batches_consumed)
        traced = self._traces(outlook, conditioned)
        self.last = session.step(
            fields,
            sizes=self._of_group(outlook.sizes),
            batch_index=module.batches_consumed,
            loss_scale=1.0 / (total * accumulate),
            next_batch=upcoming,
            next_sizes=self._of_group(outlook.next_sizes) if outlook.next_sizes else None,
            self_conditioned=conditioned,
            reduce=reduce,
            bucket=outlook.bucket,
            next_bucket=outlook.next_bucket,
            kept=kept,
            next_kept=upcoming_kept,
        )
        self._promised = outlook.next_ticket
        module.batches_consumed += 1
        self.replanned = self._replan(self.last, traced) if traced is not None else {}
        return self._means(self.last.loss_sum, total), total

    def _kept(self, outlook: Outlook) -> tuple[Groups | None, Groups | None]:
        """What a cache has of the batch and of the next one; all ranks find the same batches."""
        number = self.module.batches_consumed
        kept, following = outlook.kept, outlook.next_kept
        return (
            None if kept is None else kept.of(number),
            None if following is None else following.of(number + 1),
        )

    def _traces(self, outlook: Outlook, conditioned: bool) -> bool | None:
        """Trace the step that comes if the replanner wants it: whether it is traced anyway."""
        if self.replanner is None:
            return None
        session = self.session
        full = (session.plan.batch_size,) * session.plan.world_size
        steady = outlook.sizes == outlook.next_sizes == full and session.encoded_ahead
        steady = (
            steady and outlook.next_kept is None
        )  # else the plan's fills are not those that run
        if not self.replanner.wants(steady=steady, self_conditioned=conditioned):
            return None
        before = session.engine.tracer is not None
        session.trace(True)
        return before

    def _replan(self, result: StepResult, traced_before: bool) -> Mapping[str, float]:
        assert self.replanner is not None
        assert result.trace is not None
        self.session.trace(traced_before)
        return self.replanner.traced(result.trace)

    def evaluate(self, batch: Any, batch_idx: int, dataloader_idx: int) -> tuple[Named, int]:
        """Run one batch forward only, under the loader's fixed noise; returns as `train`."""
        outlook = _take(self.evaluation)
        fields, count = self._fields(batch, outlook)
        fields[DRAW_KEY] = self.module.evaluation_keys(count, batch_idx, dataloader_idx)
        self._evaluated = (fields, outlook, dataloader_idx)
        return self._forward(fields, outlook, dataloader_idx)

    def evaluate_at(self, level: int) -> tuple[Named, int]:
        """The batch evaluated last, with a fixed timestep; see `objective.draws.at_level`."""
        assert self._evaluated is not None, "evaluate() comes first"
        fields, outlook, dataloader_idx = self._evaluated
        keys = at_level(fields[DRAW_KEY], level)
        return self._forward({**fields, DRAW_KEY: keys}, outlook, dataloader_idx)

    def _forward(self, fields: Named, outlook: Outlook, dataloader_idx: int) -> tuple[Named, int]:
        total = sum(outlook.sizes)
        result = self.session.step(
            fields,
            sizes=self._of_group(outlook.sizes),
            batch_index=0,
            loss_scale=0.0,
            self_conditioned=self.module.is_self_conditioned(-(1 + dataloader_idx)),
            training=False,
            reduce=False,
            bucket=outlook.bucket,
        )
        return self._means(result.loss_sum, total), total

    def _fields(self, batch: Any, outlook: Outlook) -> tuple[Named, int]:
        fields = select_fields(self.module.spec, batch)
        count, announced = num_samples(fields), outlook.sizes[self.session.rank]
        if count != announced:
            raise DPipeError(
                f"the batch has {count} samples, the loader had announced {announced}; a hook must "
                "not change the number of samples of a batch"
            )
        if self.module.spec.shapes and self.module.spec.bucket_of(fields) != outlook.bucket:
            raise DPipeError(
                f"the batch is of shape class {self.module.spec.bucket_of(fields)!r}, the loader "
                f"had announced {outlook.bucket!r}; a hook must not change a batch's shapes"
            )
        return fields, count

    def _of_group(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        session = self.session
        return tuple(sizes[rank] for rank in session.plan.groups[session.group])

    def _means(self, sums: Mapping[str, Tensor], total: int) -> Named:
        """Global mean of every backbone's loss; each sum is on one rank of each group."""
        names = [backbone.name for backbone in self.module.spec.backbones]
        joint = torch.zeros(len(names), device=self.session.device)
        for index, name in enumerate(names):
            if name in sums:
                joint[index] = sums[name]
        if self.session.plan.world_size > 1:
            dist.all_reduce(joint)
        return dict(zip(names, joint / total, strict=True))


def _take(outlooks: deque[Outlook]) -> Outlook:
    if not outlooks:
        raise DPipeError(
            "a batch came that no loader had announced; let the Trainer fetch the batches (no "
            "dataloader_iter, no step called by hand)"
        )
    return outlooks.popleft()

"""Put plan, programs, engine and encodings together: one object that runs training steps.

This is the seam between the Lightning side and the runtime; it imports no lightning, so that
`dpipe verify`, benchmarks and tests drive exactly what a Trainer drives.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_dpipe.core.buckets import BASE
from lightning_dpipe.core.caching import CacheCut
from lightning_dpipe.core.errors import PlanError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.jsonio import digest
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.core.program import Program, StepShape
from lightning_dpipe.lowering.channels import plan_channels
from lightning_dpipe.lowering.lower import lower
from lightning_dpipe.planning.schedules.of_plan import schedule_of
from lightning_dpipe.runtime.bound import Binding
from lightning_dpipe.runtime.encodings import Encodings
from lightning_dpipe.runtime.engine import Engine, StepInputs, StepResult
from lightning_dpipe.runtime.frozen import FrozenRunner, Keeper
from lightning_dpipe.runtime.reduce import Reducer
from lightning_dpipe.runtime.stage import StageRunner
from lightning_dpipe.runtime.trace import Tracer
from lightning_dpipe.runtime.transport import Transport
from lightning_dpipe.simulation.check import check_programs, check_schedule

_MOST_PROGRAMS = 1024
"""Programs kept; a loader whose batches are of ever other sizes must not fill the memory."""

FillsOf = Callable[[str, str], tuple[Fill, ...]]
"""The fills of a step, by the shape class of its batch and that of the batch to encode ahead."""


CachedFillsOf = Callable[[str, str, tuple[int, ...]], tuple[Fill, ...]]
"""The same for a next batch of which some groups of encodings are at hand."""

Groups = Mapping[int, Mapping[int, Tensor]]
"""Kept encodings of a batch, ``[batch, ...]``: by group of the cache's cut, by value."""


class Cache(Keeper, Protocol):
    """Where encodings are kept; `strategy.cache` has one on disk."""

    @property
    def cut(self) -> CacheCut:
        """What is kept."""

    def step_ended(self) -> None:
        """A step's encodings have all been seen."""


class PipelineSession:
    """Runs steps of one rank. All ranks of a group must call it alike.

    The frozen work of `next_batch` runs inside the step, and the following call finds it encoded.
    `buckets` are the graphs of the shape classes beside the base, whose graph is `graph`; `fills`
    gives their steps' fills, by default the plan's own. `last_pair` are the classes of the last
    step and of the one after it, `last_cached` the groups of the latter's encodings at hand.
    """

    def __init__(
        self,
        *,
        graph: ModelGraph,
        binding: Binding,
        plan: Plan,
        rank: int,
        transport: Transport,
        device: torch.device,
        seed: int,
        reducer: Reducer | None = None,
        trace: bool = False,
        buckets: Mapping[str, ModelGraph] | None = None,
        fills: FillsOf | None = None,
    ) -> None:
        if digest(graph) != plan.graph_digest:
            raise PlanError(
                f"the plan was made for model {plan.graph_digest}, this one is {digest(graph)}; "
                "plan again"
            )
        self.graph, self.plan, self.rank = graph, plan, rank
        self.graphs: dict[str, ModelGraph] = {BASE: graph, **(buckets or {})}
        self.fills = fills
        self.last_pair = (BASE, BASE)
        self.last_cached: tuple[int, ...] = ()
        self._cache: Cache | None = None
        self.cached_fills: CachedFillsOf | None = None
        self._inputs = dict(binding.inputs)
        # Draws are made on the host: with their keys on the device each one would wait for it.
        self._on_host = None if binding.draw_key in graph.side_inputs else binding.draw_key
        self.group, self.position = plan.locate(rank)
        self.device = device
        self._transport = transport
        self._reducer = reducer
        stages = plan.stages_on(self.position)
        self.stages = {i: StageRunner(graph, plan.stages, i, binding, device) for i in stages}
        self.tracer = Tracer(device, rank, self.position)
        self._frozen = FrozenRunner(graph, binding.layers)
        self.engine = Engine(
            stages=self.stages,
            backbones={i: plan.stages[i].backbone for i in stages},
            frozen=self._frozen,
            transport=transport,
            device=device,
            group=self.group,
            seed=seed,
            reducer=reducer,
            tracer=self.tracer if trace else None,
        )
        self._banks = [Encodings(graph, self.position, device) for _ in range(2)]
        self._ahead: tuple[str, tuple[int, ...]] | None = None
        self._programs: dict[StepShape, Program] = {}
        transport.open(plan_channels(plan, graph))

    def trace(self, on: bool) -> None:
        """Record the following steps, or stop doing so."""
        self.engine.tracer = self.tracer if on else None

    def keep(self, cache: Cache | None, fills: CachedFillsOf | None = None) -> None:
        """Show a cache what is encoded from now on; None: no longer.

        `fills` are those of steps whose next batch's encodings are at hand; by default the plan's,
        without the layers that are idle then.
        """
        self._cache, self.cached_fills = cache, fills
        self._programs.clear()
        self.engine.buffers.forget()

    def refill(self, plan: Plan) -> None:
        """Use other fills from the next step on; what was encoded ahead stays valid.

        Raises:
            PlanError: More than the fills differs, so that weights or channels would have to move.
        """
        kept = replace(plan, fills=self.plan.fills, profile_digest=self.plan.profile_digest)
        if kept != self.plan:
            raise PlanError(
                "the new plan differs from the one in use in more than its fills; "
                "give it to a new run"
            )
        self.plan = plan
        self._programs.clear()
        self.engine.buffers.forget()

    @property
    def encoded_ahead(self) -> bool:
        """Whether the step that comes finds its batch encoded."""
        return self._ahead is not None

    def forget(self) -> None:
        """Drop what was encoded ahead: the next batch will be another one."""
        self._ahead = None

    def step(
        self,
        batch: Mapping[str, Tensor],
        *,
        sizes: tuple[int, ...],
        batch_index: int,
        loss_scale: float,
        next_batch: Mapping[str, Tensor] | None = None,
        next_sizes: tuple[int, ...] | None = None,
        self_conditioned: bool = False,
        training: bool = True,
        dropout: bool | None = None,
        reduce: bool = True,
        bucket: str = BASE,
        next_bucket: str = BASE,
        kept: Groups | None = None,
        next_kept: Groups | None = None,
    ) -> StepResult:
        """Run one micro-step of an accumulation window, or one evaluation batch.

        Args:
            batch: This rank's fields by name, ``[sizes[device], ...]``.
            sizes: Local batch size of each device of the group.
            batch_index: Batches consumed before this one; keys dropout.
            loss_scale: Gradient of the reported loss with respect to one sample's loss.
            next_batch: The batch to encode ahead, if any.
            next_sizes: Its sizes; None exactly when no rank has a next batch.
            self_conditioned: Whether this batch's coin came up.
            training: False runs forward only and leaves what was encoded ahead alone.
            dropout: Draw in trained layers; default: `training`.
            reduce: Whether gradients are complete after this step (last of the window).
            bucket: Shape class of the batch.
            next_bucket: Shape class of the next batch.
            kept: What the cache has of the batch, the same groups on every rank.
            next_kept: The same of the next batch.

        Raises:
            PlanError: The batch has fewer samples than the pipeline needs, or its class is unknown.
        """
        encoded = training and self._is_encoded(bucket, sizes)
        shape = StepShape(
            sizes=sizes,
            next_sizes=next_sizes,
            encoded=encoded,
            self_conditioned=self_conditioned,
            training=training,
            reduce=reduce,
            bucket=bucket,
            next_bucket=BASE if next_sizes is None else next_bucket,
            cached=() if encoded else tuple(sorted(kept or ())),
            next_cached=() if next_sizes is None else tuple(sorted(next_kept or ())),
        )
        program = self.program(shape)
        following = bucket if next_sizes is None else next_bucket
        self.last_pair, self.last_cached = (bucket, following), shape.next_cached
        this = self._banks[0] if training else Encodings(self.graph, self.position, self.device)
        if not encoded:
            this.begin(self._fields(batch, kept), sizes, self._graph(bucket, shape.cached))
        ahead = None
        if next_sizes is not None:
            ahead = self._banks[1]
            fields = self._fields(next_batch or {}, next_kept)
            ahead.begin(fields, next_sizes, self._graph(next_bucket, shape.next_cached))
        inputs = StepInputs(
            this=this,
            next=ahead,
            loss_scale=loss_scale,
            batch_index=batch_index,
            dropout=training if dropout is None else dropout,
        )
        self._frozen.keeper = self._cache if training else None
        result = self.engine.run(program, inputs)
        if training:
            if self._cache is not None:
                self._cache.step_ended()
            self._ahead = None if next_sizes is None else (next_bucket, next_sizes)
            self._banks.reverse()
        return result

    def _is_encoded(self, bucket: str, sizes: tuple[int, ...]) -> bool:
        """Whether the step before has encoded the batch."""
        if self._ahead not in (None, (bucket, sizes)):
            raise PlanError(
                f"encoded ahead for batch sizes {_batch(*self._ahead)}, got "
                f"{_batch(bucket, sizes)}; call forget() when the next batch is not the one that "
                "was announced"
            )
        return self._ahead is not None

    def close(self) -> None:
        """Release the transport's channels."""
        self._transport.close()

    def wait_reduction(self) -> None:
        """Wait for the replica sums that the step started."""
        if self._reducer is not None:
            self._reducer.wait()

    def program(self, shape: StepShape) -> Program:
        """This rank's program for a shape class: lowered and checked once."""
        if shape not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
                self.engine.buffers.forget()
            self._programs[shape] = self.programs(shape)[self.position]
        return self._programs[shape]

    def programs(self, shape: StepShape) -> tuple[Program, ...]:
        """The whole group's programs, checked for legality and deadlock."""
        plan, pair = self.plan, (shape.bucket, shape.next_bucket)
        unknown = [name for name in pair if name not in self.graphs]
        if unknown:
            raise PlanError(f"shape class {unknown[0]!r} is none of {', '.join(self.graphs)}")
        if shape.next_cached and self.cached_fills is not None:
            plan = replace(plan, fills=self.cached_fills(*pair, shape.next_cached))
        elif self.fills is not None and shape.next_sizes is not None and pair != (BASE, BASE):
            plan = replace(plan, fills=self.fills(*pair))
        total = sum(shape.sizes)
        if total < plan.num_microbatches:
            # A short last batch: as many micro-batches as it has samples.
            plan = replace(plan, num_microbatches=max(total, 1))
        schedule = schedule_of(plan, self_conditioned=shape.self_conditioned)
        check_schedule(schedule, plan, self.graph, self_conditioned=shape.self_conditioned)
        graph = self._graph(shape.bucket, shape.cached)
        ahead = self._graph(shape.next_bucket, shape.next_cached)
        programs = lower(plan, schedule, graph, shape, group=self.group, next_graph=ahead)
        check_programs(programs)
        return programs

    def _graph(self, bucket: str, cached: tuple[int, ...]) -> ModelGraph:
        graph = self.graphs[bucket]
        if not cached:
            return graph
        if self._cache is None:
            raise PlanError("kept encodings were given to a session without a cache; call keep()")
        return self._cache.cut.only(cached).graph(graph)

    def _fields(self, batch: Mapping[str, Tensor], kept: Groups | None) -> dict[int, Tensor]:
        wanted = self._inputs
        missing = sorted(set(wanted) - set(batch))
        if missing:
            raise PlanError(
                f"the batch has no field {missing[0]!r} (it has: {', '.join(sorted(batch))}); "
                "PipelineSpec.inputs declares it"
            )
        fields = {
            v: batch[name] if v == self._on_host else batch[name].to(self.device, non_blocking=True)
            for name, v in wanted.items()
        }
        at_hand = (item for group in (kept or {}).values() for item in group.items())
        return fields | {v: t.to(self.device, non_blocking=True) for v, t in at_hand}


def _batch(bucket: str, sizes: tuple[int, ...]) -> str:
    return f"{sizes}" + ("" if bucket == BASE else f" of shape class {bucket!r}")


def cut(module: nn.Module, binding: Binding, plan: Plan, position: int) -> None:
    """Keep only this device's trained weights; the others become meta parameters, in place.

    Names, order and optimizer numbering stay those of the uncut model: a meta parameter never gets
    a gradient, so no optimizer touches it. Frozen components are kept: every rank encodes.
    """
    cut_up = {stage.backbone for stage in plan.stages}
    frozen = [layers for name, layers in binding.layers.items() if name not in cut_up]
    kept = {id(p) for layers in frozen for layer in layers for p in layer.parameters}
    dropped: dict[int, nn.Parameter] = {}
    for index, stage in enumerate(plan.stages):
        layers = binding.layers[stage.backbone][stage.start : stage.stop]
        here = index in plan.stages_on(position)
        for layer in layers:
            for p in layer.parameters:
                if here:
                    kept.add(id(p))
                else:
                    dropped[id(p)] = p
    absent = {  # one for each weight, so that a weight of two names stays one
        key: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for key, p in dropped.items()
        if key not in kept
    }
    for owner in module.modules():
        for name, weight in list(owner._parameters.items()):
            if id(weight) in absent:
                owner._parameters[name] = absent[id(weight)]

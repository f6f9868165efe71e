"""Sampling over stages: every rank walks its ops; exactly, or with patches one step stale.

In:     a module, backbone or transformer whose weights of this rank's stages are here; a request.
Out:    clean latents on the rank of the last stage.
Source: PipeFusion, Fang et al., arXiv 2405.14430. Ours differs: the text stream and all conditions
        are computed once a step, patches do not depend on the number of stages, and solver and
        noise are those of a single process.
Nothing outlives a call: no buffer, no processor, no position of any solver.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import PlanError, TransportError
from lightning_dpipe.core.program import Channel, Message
from lightning_dpipe.runtime.transport import Handle, Transport
from lightning_dpipe.sampling.attention import Cursor, row_attention
from lightning_dpipe.sampling.call import Call, open_call
from lightning_dpipe.sampling.mail import Mail
from lightning_dpipe.sampling.parts import Along, Scope
from lightning_dpipe.sampling.plan import SamplingPlan
from lightning_dpipe.sampling.routes import carries
from lightning_dpipe.sampling.rows import Source
from lightning_dpipe.sampling.simple import SampleRequest
from lightning_dpipe.sampling.solver import PatchSolvers, SolverOptions, group_solvers
from lightning_dpipe.sampling.units import Op, Unit

OnStep = Callable[[int, Tensor], None]
"""Called on the last stage's rank after every step with its number and all latents."""


@torch.no_grad()
def sample(
    source: Source,
    scheduler: Any,
    request: SampleRequest,
    plan: SamplingPlan,
    *,
    options: SolverOptions | None = None,
    transport: Transport | None = None,
    rank: int = 0,
    pipelines: Sequence[tuple[int, ...]] = (),
    on_step: OnStep | None = None,
) -> Tensor | None:
    """Draw latents ``[batch, channels, height, width]``. A plan's ranks pass equal arguments.

    Args:
        source: A module with a spec (`DiffusionModule`), a backbone, or a diffusers transformer;
            weights of other ranks' stages may be on meta.
        scheduler: A diffusers scheduler; it is copied, not changed.
        request: Starting noise, steps, conditions by the names the backbone reads, guidance.
        plan: Stages, mode, patches.
        options: What the scheduler is given beside.
        transport: None for a plan whose stages are all on one rank.
        rank: This process's, as the plan counts them.
        pipelines: Ranks by stage of all pipelines with these stages that sample side by side, each
            for its own images, in one order on all ranks; empty: there is this one.
        on_step: See `OnStep`.

    Returns:
        The latents on the last stage's rank, None on others.

    Raises:
        PlanError, SpecError, UnsupportedError: See `open_call`.
        TransportError: Ranks mean different calls.
        RankError: Another rank failed.
    """
    call = open_call(source, scheduler, request, plan, options or SolverOptions())
    if pipelines and rank in plan.owners and plan.owners not in pipelines:
        raise PlanError(
            f"stages are on ranks {list(plan.owners)}, which is none of the pipelines "
            f"{[list(p) for p in pipelines]} that sample side by side; list them all"
        )
    if transport is None and set(plan.owners) != {rank}:
        raise PlanError(
            f"stages are on ranks {sorted(set(plan.owners))}, this is rank {rank} without a "
            "transport; pass one, or put all stages on this rank"
        )
    if transport is not None:
        transport.open(
            channel
            for owners in pipelines or (plan.owners,)
            for channel in call.traffic.channels(owners)
        )
        _compare(call, transport, rank)
    if rank not in plan.owners:
        return None
    return _Walk(call, transport, rank, on_step).run()


class _Walk:
    """One rank's part of a call."""

    def __init__(
        self, call: Call, transport: Transport | None, rank: int, on_step: OnStep | None
    ) -> None:
        self.call = call
        self.on_step = on_step
        self.cursor = Cursor()
        owners = call.plan.owners
        self.stages = [stage for stage, owner in enumerate(owners) if owner == rank]
        self.last = len(owners) - 1
        orders = call.timeline.orders()
        self.ops = orders[rank]
        self.opening = [unit for unit in call.units if unit.step == 0]
        incoming = call.traffic.into(rank, orders, self.opening)
        self.mail = Mail(transport, incoming, call.request.noise.device)
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}  # by (stage, group)
        self.solvers: list[PatchSolvers] = []

    def run(self) -> Tensor | None:
        """Walk all ops; what they hold goes with this object."""
        call, layers = self.call, self.call.model.layers
        local = [layers[i] for s in self.stages for i in range(*call.plan.stages[s])]
        with ExitStack() as stack:
            # Values have the weights' dtype, in messages too; autocast would choose others.
            device = call.request.noise.device.type
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(_evaluating([m for layer in local for m in layer.modules]))
            if call.stale:
                sites = [site for layer in local for site in layer.sites]
                stack.enter_context(row_attention(sites, self.cursor))
            if self.last in self.stages:
                self.solvers = group_solvers(
                    call.scheduler, call.patches, call.model.patch, call.noises, call.options
                )
                for unit in self.opening:
                    self._to_first(unit, None)
            for op in self.ops:
                self._do(op)
            self.mail.drain()
        return torch.cat([s.latents for s in self.solvers]) if self.solvers else None

    def _do(self, op: Op) -> None:
        unit, call = op.unit, self.call
        self.mail.retire(unit.step)
        view = call.traffic.view(unit)
        self.cursor.group, self.cursor.view = unit.group, view
        kept = self.kept.setdefault((op.stage, unit.group), dict(call.inputs[unit.group]))
        values = self._received(op, kept)
        model = call.model
        if unit.opens_step:
            kept[model.timestep] = self._timestep(unit)
        scopes = [Scope.UNIT]
        if unit.opens_step:
            scopes.insert(0, Scope.STEP)
        if unit.opens_call:
            scopes.insert(0, Scope.CALL)
        for scope in scopes:
            for layer in model.layers[slice(*call.plan.stages[op.stage])]:
                part = layer.parts.get(scope)
                if part is not None:
                    made = part.fn(view, *(self._find(n, values, kept) for n in part.reads))
                    store = values if scope is Scope.UNIT else kept
                    store.update(zip(part.writes, _tuple(made), strict=True))
        out = values.get(model.out)
        for key, message in call.traffic.out_of(op):
            if key[2] not in call.traffic.fed_back():
                self.mail.put(key, message, self._find(key[2], values, kept), unit.step)
        if op.stage == self.last:
            assert out is not None
            self._solve(unit, out)

    def _received(self, op: Op, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this op reads from other stages; what lasts longer goes to `kept`."""
        call, unit = self.call, op.unit
        model, traffic = call.model, call.traffic
        values: dict[str, Tensor] = {}
        for route in traffic.routes:
            if route.target != op.stage:
                continue
            if carries(model, route, unit):
                store = values if route.scope is Scope.UNIT else kept
                store[route.name] = self.mail.take((unit.index, op.stage, route.name))
            elif model.values[route.name].along is Along.TEXT:
                shape = model.values[route.name].shape(
                    traffic.batches[unit.group][1], traffic.view(unit)
                )
                values[route.name] = call.request.noise.new_empty(shape, dtype=model.dtype)
        if op.stage == 0:
            for name in traffic.fed_back():
                value = self.mail.take((unit.index, 0, name)).to(model.dtype)
                values[name] = value if call.scale is None else torch.cat([value, value])
        return values

    def _find(self, name: str, values: dict[str, Tensor], kept: dict[str, Tensor]) -> Tensor:
        return values[name] if name in values else kept[name]

    def _timestep(self, unit: Unit) -> Tensor:
        """The solver's time for every row of the model's batch."""
        call = self.call
        t: Tensor = call.scheduler.timesteps[unit.step].expand(call.traffic.batches[unit.group][1])
        scale = call.model.timestep_scale
        if scale != 1.0:
            t = t.to(call.request.noise.dtype) / scale
        return t

    def _solve(self, unit: Unit, out: Tensor) -> None:
        """Guide, step the unit's rows, and send the next step's input on its way."""
        call, solvers = self.call, self.solvers[unit.group]
        guided = _guided(out, call.scale, call.model.unconditional_first)
        conditioning = call.request.self_conditioning
        estimate = None
        if call.model.estimate is not None and conditioning is not None:
            scaled = solvers.model_input(unit.step, unit.patch)
            t = self._timestep(unit)[: len(scaled)]
            estimate = conditioning.estimate(guided, scaled, t)
        out = guided[:, : call.traffic.sample[0]].to(call.request.noise.dtype)
        solvers.step(unit.step, unit.patch, out)
        start = call.traffic.view(unit).first * call.model.patch
        for later in call.traffic.following[unit.index]:
            piece = None
            if estimate is not None:
                rows = solvers.rows(later.patch)
                piece = estimate[:, :, rows.start - start : rows.stop - start]
            self._to_first(later, piece)
        is_last = unit.index + 1 == len(call.units) or call.units[unit.index + 1].step > unit.step
        if is_last and self.on_step is not None:
            self.on_step(unit.step, torch.cat([s.latents for s in self.solvers]))

    def _to_first(self, unit: Unit, estimate: Tensor | None) -> None:
        """Hand a unit's latent rows, and the estimate (zeros at first), to the first stage."""
        call = self.call
        made = self.solvers[unit.group].model_input(unit.step, unit.patch)
        for key, message in call.traffic.to_first(unit):
            value = made
            if key[2] == call.model.estimate:
                value = torch.zeros_like(made) if estimate is None else estimate.to(made.dtype)
            self.mail.put(key, message, value, unit.step - 1)


def _guided(out: Tensor, scale: float | None, unconditional_first: bool) -> Tensor:
    """Classifier-free guidance, in the form that diffusers' pipelines compute."""
    if scale is None:
        return out
    first, second = out.chunk(2)
    unconditional, conditional = (first, second) if unconditional_first else (second, first)
    return unconditional + scale * (conditional - unconditional)


def _tuple(made: Any) -> Sequence[Tensor]:
    return (made,) if isinstance(made, Tensor) else made


def _compare(call: Call, transport: Transport, rank: int) -> None:
    """Every edge's two ends show each other what they are about to do."""
    mine = torch.tensor([call.digest()], device=call.request.noise.device)
    started: list[tuple[Channel, Tensor | None, Handle]] = []
    for channel in call.traffic.channels():
        message = Message(channel=channel, tag="digest of the call", shape=(1,), dtype="int64")
        if channel.source == rank:
            started.append((channel, None, transport.send(message, mine)))
        elif channel.target == rank:
            buffer = torch.empty_like(mine)
            started.append((channel, buffer, transport.post(message, buffer)))
    for channel, theirs, handle in started:
        handle.wait()
        if theirs is not None and not torch.equal(theirs, mine):
            raise TransportError(
                f"rank {channel.source} samples with digest {theirs.item():x}, rank {rank} with "
                f"{mine.item():x}; pass equal plan, steps, shapes and guidance on all ranks"
            )


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode inside, each module's own mode after."""
    modes = [(module, module.training) for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode

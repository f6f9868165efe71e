"""One process, no pipeline: the independent side of every parity test.

It knows layers by name only: no graph, no values, no program. Encoders run on exactly the slices
that the plan prescribes, since a library kernel's result may depend on the batch it is given.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.models.spec import (
    Backbone,
    FrozenComponent,
    PipelineSpec,
    SelfConditioning,
)

Source = tuple[str, int, str]


def _sources(
    spec: PipelineSpec, fields: Iterable[str]
) -> tuple[dict[tuple[str, int], list[Source]], dict[str, Source]]:
    """Where each frozen layer's reads come from, and the last writer of each name."""
    last: dict[str, Source] = {name: ("", 0, name) for name in fields}
    reads: dict[tuple[str, int], list[Source]] = {}
    waiting = list(spec.frozen)
    while waiting:
        for component in waiting:
            own = {w for layer in component.layers for w in layer.writes}
            if all(r in last or r in own for x in component.layers for r in x.reads):
                break
        else:
            raise AssertionError("cyclic components")
        waiting.remove(component)
        for index, layer in enumerate(component.layers):
            reads[(component.name, index)] = [last[r] for r in layer.reads]
            for name in layer.writes:
                last[name] = (component.name, index, name)
    return reads, last


def whole(components: Sequence[FrozenComponent], rows: int) -> list[Fill]:
    """Every component on the whole local batch, in an order in which inputs exist."""
    return [
        Fill(
            device=0, after=None, component=c.name, start=0, stop=len(c.layers), first=0, last=rows
        )
        for c in components
    ]


def encode(
    spec: PipelineSpec, fields: Mapping[str, Tensor], fills: Sequence[Fill]
) -> dict[str, Tensor]:
    """Run the frozen components slice by slice; returns every named tensor of the local batch."""
    reads, last = _sources(spec, fields)
    rows = len(next(iter(fields.values())))
    store: dict[Source, Tensor] = {("", 0, name): t for name, t in fields.items()}
    layers = {c.name: c.layers for c in spec.frozen}
    with torch.no_grad():
        for f in fills:
            for index in range(f.start, f.stop):
                layer = layers[f.component][index]
                inputs = [store[s][f.first : f.last] for s in reads[(f.component, index)]]
                outputs = layer.module(*inputs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                for name, out in zip(layer.writes, outputs, strict=True):
                    full = store.setdefault(
                        (f.component, index, name),
                        torch.empty(rows, *out.shape[1:], dtype=out.dtype),
                    )
                    full[f.first : f.last] = out
    return {name: store[source] for name, source in last.items()}


def joint(locals_by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Samples of several ranks in slot order: sample i of each rank, then sample i + 1."""
    rows = [len(next(iter(x.values()))) for x in locals_by_rank]
    order = [(r, i) for i in range(max(rows)) for r in range(len(rows)) if i < rows[r]]
    return {
        name: torch.stack([locals_by_rank[r][name][i] for r, i in order])
        for name in locals_by_rank[0]
    }


def accumulate(
    spec: PipelineSpec,
    named: Mapping[str, Tensor],
    num_microbatches: int,
    scale: float,
    *,
    self_conditioned: bool = False,
) -> float:
    """Forward and backward of each micro-batch in turn; returns the summed loss.

    Gradients accumulate in the parameters, as plain gradient accumulation does.
    """
    total = 0.0
    pieces = {k: v.tensor_split(num_microbatches) for k, v in named.items()}
    for m in range(num_microbatches):
        env = {name: parts[m] for name, parts in pieces.items()}
        for backbone in spec.backbones:
            own = dict(env)
            _feed_back(spec.self_conditioning, backbone, own, self_conditioned)
            done = _run(backbone, own)
            loss = spec.losses()[backbone.name]
            per_sample = loss.fn(*[done[r] for r in loss.reads])
            total += float(per_sample.detach().sum())
            (per_sample * scale).sum().backward()
    return total


def _feed_back(
    conditioning: SelfConditioning | None,
    backbone: Backbone,
    env: dict[str, Tensor],
    self_conditioned: bool,
) -> None:
    """Write the estimate that a backbone reads, if it reads one: zeros, or that of a first run."""
    if conditioning is None or not any(conditioning.writes in x.reads for x in backbone.layers):
        return
    rows = len(next(iter(env.values())))
    zeros = torch.zeros(rows, *conditioning.shape, dtype=conditioning.dtype)
    env[conditioning.writes] = zeros
    if self_conditioned:
        with torch.no_grad():
            first = _run(backbone, dict(env))
            env[conditioning.writes] = conditioning.estimate(
                *[first[r] for r in conditioning.reads]
            )


def _run(backbone: Backbone, env: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in backbone.layers:
        outputs = layer.module(*[env[r] for r in layer.reads])
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        env.update(zip(layer.writes, outputs, strict=True))
    return env


def fills_of(plan: Plan, device: int, spec: PipelineSpec, *, self_conditioned: bool) -> list[Fill]:
    """The slices a device's samples are encoded in, by it or others, in a steady filled step."""
    own = [f for f in plan.fills if f.home == device and f.self_conditioned == self_conditioned]
    return own or whole(spec.frozen, plan.batch_size)

"""One training step in one process, as plainly as possible: what ``dpipe verify`` compares with.

In:     a bound model, a plan, each rank's fields.
Out:    the loss; gradients in the parameters.

It knows no stage, schedule, program or message. From the plan it takes how samples are cut into
micro-batches and encoder slices, because a kernel's last bits depend on the batch it is given.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.runtime.bound import Binding, BoundLayer

Values = dict[int, Tensor]


def accumulate_step(
    binding: Binding,
    graph: ModelGraph,
    plan: Plan,
    fields: Sequence[Mapping[str, Tensor]],
    *,
    self_conditioned: bool,
) -> float:
    """Forward and backward of every micro-batch in turn.

    Args:
        binding: The whole model.
        graph: What it was bound to.
        plan: How the batch is cut.
        fields: Batch fields by name, for each global rank.
        self_conditioned: Whether a first sweep makes the estimate.

    Returns:
        Mean loss over the global batch, summed over backbones.
    """
    total = sum(_rows(f) for f in fields)
    loss_sum = 0.0
    for ranks in plan.groups:
        encoded = {
            rank: encode(
                binding, graph, fields[rank], _slices(plan, graph, device, self_conditioned)
            )
            for device, rank in enumerate(ranks)
        }
        pieces = {v: t.tensor_split(plan.num_microbatches) for v, t in joint(encoded).items()}
        group_sum: Tensor | float = 0.0  # of each backbone: added up in its own precision
        for m in range(plan.num_microbatches):
            values = {v: parts[m] for v, parts in pieces.items()}
            group_sum += _micro_step(binding, graph, values, 1.0 / total, self_conditioned)
        loss_sum += sum(torch.as_tensor(group_sum).tolist())
    return loss_sum / total


def encode(
    binding: Binding, graph: ModelGraph, fields: Mapping[str, Tensor], slices: Sequence[Fill]
) -> Values:
    """Run frozen layers slice by slice; returns batch fields and encoded values of all samples."""
    values = {v: fields[name] for name, v in binding.inputs.items()}
    rows = _rows(fields)
    with torch.no_grad():
        for piece in slices:
            for layer in binding.layers[piece.component][piece.start : piece.stop]:
                inputs = {v: values[v][piece.first : piece.last] for v in layer.reads}
                for v, out in layer.run(inputs).items():
                    if v not in values:
                        values[v] = out.new_empty((rows, *out.shape[1:]))
                    values[v][piece.first : piece.last] = out
    return {v: values[v] for v in (*graph.side_inputs, *binding.inputs.values())}


def joint(by_rank: Mapping[int, Values]) -> Values:
    """Samples of a pipeline's ranks in slot order: sample 0 of each rank by number, then 1, ..."""
    parts = [values for _, values in sorted(by_rank.items())]
    rows = [_rows(values) for values in parts]
    order = [(r, i) for i in range(max(rows)) for r, n in enumerate(rows) if i < n]
    return {v: torch.stack([parts[r][v][i] for r, i in order]) for v in parts[0]}


def _slices(plan: Plan, graph: ModelGraph, device: int, self_conditioned: bool) -> Sequence[Fill]:
    """How a device's batch is encoded ahead: as the plan says, or all of it at once."""
    own = [f for f in plan.fills if f.home == device and f.self_conditioned == self_conditioned]
    return own or [
        Fill(
            device=device,
            after=None,
            component=component.name,
            start=0,
            stop=len(component.layers),
            first=0,
            last=plan.batch_size,
        )
        for component in graph.frozen
    ]


def _micro_step(
    binding: Binding, graph: ModelGraph, values: Values, scale: float, self_conditioned: bool
) -> Tensor:
    """Summed loss of each backbone, after its backward."""
    layers = [x for c in graph.backbones for x in binding.layers[c.name]]
    if graph.feedback is not None and binding.feedback is not None:
        declared = graph.values[graph.feedback.writes]
        like = next(iter(values.values()))
        values[graph.feedback.writes] = torch.zeros(
            (len(like), *declared.shape), dtype=getattr(torch, declared.dtype), device=like.device
        )
        if self_conditioned:
            with torch.no_grad():
                first = _run(layers, values)
                estimate = binding.feedback.fn(*[first[v] for v in binding.feedback.reads])
            values[graph.feedback.writes] = estimate
    done = _run(layers, values)
    per_sample = [loss.fn(*[done[v] for v in loss.reads]) for loss in binding.losses.values()]
    for losses in per_sample:
        (losses * scale).sum().backward()  # type: ignore[no-untyped-call]
    return torch.stack([losses.detach().sum() for losses in per_sample])


def _run(layers: Sequence[BoundLayer], values: Values) -> Values:
    done = dict(values)
    for layer in layers:
        done |= layer.run(done)
    return done


def _rows(fields: Mapping[Any, Tensor]) -> int:
    return len(next(iter(fields.values())))

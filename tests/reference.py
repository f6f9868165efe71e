"""The model in one process, as plainly as it can be said: the oracle for everything that cuts it.

It shares nothing with the engine but the Binding, and knows no stages, micro-batches or buffers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.runtime.bound import Binding


def run_once(
    binding: Binding,
    graph: ModelGraph,
    fields: Mapping[str, Tensor],
    *,
    feedback: Tensor | None = None,
) -> dict[int, Tensor]:
    """Run every layer in order.

    Args:
        binding: What to run.
        graph: The graph it was bound to.
        fields: Batch fields by name, each ``[batch, ...]``; more than the model reads is fine.
        feedback: The self-conditioning estimate ``[batch, ...]``; None stands for zeros.

    Returns:
        Every value by its index, batch fields included.

    Raises:
        SpecError: A field that the model declares is missing.
    """
    missing = [name for name in binding.inputs if name not in fields]
    if missing:
        raise SpecError(f"the batch lacks {', '.join(missing)}; it has {', '.join(fields)}")
    values = {v: fields[name] for name, v in binding.inputs.items()}
    if graph.feedback is not None:
        declared = graph.values[graph.feedback.writes]
        some = next(iter(values.values()))
        if feedback is None:
            feedback = torch.zeros(
                (some.shape[0], *declared.shape),
                dtype=getattr(torch, declared.dtype),
                device=some.device,
            )
        values[graph.feedback.writes] = feedback
    for component in graph.frozen:
        with torch.no_grad():
            for layer in binding.layers[component.name]:
                values |= layer.run(values)
    for component in graph.backbones:
        for layer in binding.layers[component.name]:
            values |= layer.run(values)
    return values


def sample_losses(binding: Binding, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Loss of each sample, shape ``[batch]``, by backbone."""
    return {
        backbone: loss.fn(*[values[v] for v in loss.reads])
        for backbone, loss in binding.losses.items()
    }

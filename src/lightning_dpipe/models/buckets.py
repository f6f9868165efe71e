"""One ModelGraph per shape class of a model: same layers and values, other shapes."""

import torch

from lightning_dpipe.core.buckets import BASE, check_alike
from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.core.graph import ModelGraph
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import PipelineSpec


def trace_buckets(
    spec: PipelineSpec,
    *,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[str, ModelGraph]:
    """Trace every shape class that a spec declares, the base first; arguments as in `trace`.

    Raises:
        SpecError: As `trace`, with the class's name; or a class changes more than shapes.
        UnsupportedError: As `trace`.
    """
    base = trace(spec, autocast=autocast, device=device)
    graphs = {BASE: base}
    for name in spec.shapes:
        try:
            graph = trace(spec.in_bucket(name), autocast=autocast, device=device)
        except SpecError as error:
            raise SpecError(f"shape class {name!r}: {error}") from error
        check_alike(base, graph, name)
        graphs[name] = graph
    return graphs

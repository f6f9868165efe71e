"""Run a whole `PipelineSpec` in one process, tensors by name: the steps of all other strategies.

In:     the spec, a batch's fields, whether this batch is self-conditioned.
Out:    one loss per sample and backbone, ``[batch]``, with the autograd graph behind it.

It knows no plan, stage or micro-batch, so it is also the independent reference the pipeline is
compared with.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import (
    DRAW_KEY,
    Backbone,
    Component,
    FrozenComponent,
    Layer,
    PipelineSpec,
    SelfConditioning,
)

Named = dict[str, Tensor]


def select_fields(spec: PipelineSpec, batch: Mapping[str, Any]) -> Named:
    """Pick the fields that the spec declares; a batch may hold more (captions, file names).

    Raises:
        SpecError: A field is missing, is no tensor, or has a dtype or per-sample shape that the
            spec does not declare.
    """
    if not isinstance(batch, Mapping):
        raise SpecError(
            f"the batch is a {type(batch).__name__}; expected a mapping with the fields "
            f"{sorted(spec.inputs)}; return a dict from the dataset or the collate function"
        )
    fields: Named = {}
    for name, field in spec.inputs.items():
        if name == DRAW_KEY:
            continue
        tensor = batch.get(name)
        if not isinstance(tensor, Tensor):
            raise SpecError(
                f"batch field {name!r} is {type(tensor).__name__}; expected a tensor "
                f"[batch, {', '.join(map(str, field.shape))}]; the batch has {sorted(batch)}"
            )
        if not spec.shapes and tuple(tensor.shape[1:]) != tuple(field.shape):
            raise SpecError(
                f"batch field {name!r} has per-sample shape {tuple(tensor.shape[1:])}, the spec "
                f"declares {tuple(field.shape)}; change the data or `PipelineSpec.inputs`"
            )
        if tensor.is_floating_point() != field.dtype.is_floating_point:
            raise SpecError(
                f"batch field {name!r} is {tensor.dtype}, the spec declares {field.dtype}; "
                "change the data or `PipelineSpec.inputs`"
            )
        fields[name] = tensor
    sizes = {name: tensor.shape[0] for name, tensor in fields.items()}
    if len(set(sizes.values())) != 1:
        raise SpecError(f"batch fields have different numbers of samples: {sizes}; expected one")
    if spec.shapes:
        spec.bucket_of(fields)
    return fields


def num_samples(fields: Mapping[str, Tensor]) -> int:
    """Samples of a batch: the extent of any field's first dimension."""
    return next(iter(fields.values())).shape[0]


def sample_losses(
    spec: PipelineSpec, fields: Mapping[str, Tensor], *, self_conditioned: bool
) -> Named:
    """Loss of each sample by backbone name, each ``[batch]``; frozen components without gradient.

    Raises:
        SpecError: A component reads a name that nothing writes.
    """
    if spec.shapes:
        spec = spec.in_bucket(spec.bucket_of(fields))
    named = dict(fields)
    with torch.no_grad():
        for component in _run_order(spec, named):
            _run_layers(component.layers, named)
    losses = {}
    for backbone in spec.backbones:
        local = dict(named)
        conditioning = spec.self_conditioning
        if conditioning is not None and conditioning.writes in _outside_reads(backbone):
            _feed_back(conditioning, backbone, local, self_conditioned)
        _run_layers(backbone.layers, local)
        loss = spec.losses()[backbone.name]
        losses[backbone.name] = loss.fn(*(local[name] for name in loss.reads))
    return losses


def _run_order(spec: PipelineSpec, available: Mapping[str, Tensor]) -> tuple[FrozenComponent, ...]:
    """Frozen components, each after those whose tensors it reads."""
    known, waiting, order = set(available), list(spec.frozen), []
    while waiting:
        ready = next((c for c in waiting if _outside_reads(c) <= known), None)
        if ready is None:
            missing = sorted(_outside_reads(waiting[0]) - known)
            raise SpecError(
                f"component {waiting[0].name!r} reads {missing}, which nothing writes before it; "
                f"available are {sorted(known)}"
            )
        waiting.remove(ready)
        order.append(ready)
        known |= {name for layer in ready.layers for name in layer.writes}
    return tuple(order)


def _outside_reads(component: Component) -> set[str]:
    written: set[str] = set()
    outside: set[str] = set()
    for layer in component.layers:
        outside |= set(layer.reads) - written
        written |= set(layer.writes)
    return outside


def _run_layers(layers: Sequence[Layer], named: Named) -> None:
    for layer in layers:
        missing = [name for name in layer.reads if name not in named]
        if missing:
            raise SpecError(
                f"layer {layer.name!r} reads {missing}, which nothing writes before it; "
                f"available are {sorted(named)}"
            )
        out = layer.module(*(named[name] for name in layer.reads))
        named.update(zip(layer.writes, (out,) if isinstance(out, Tensor) else out, strict=True))


def _feed_back(
    conditioning: SelfConditioning, backbone: Backbone, named: Named, self_conditioned: bool
) -> None:
    """Write zeros, or the estimate of a first sweep without gradient (arXiv 2208.04202)."""
    like = next(iter(named.values()))
    named[conditioning.writes] = torch.zeros(
        (like.shape[0], *conditioning.shape), dtype=conditioning.dtype, device=like.device
    )
    if not self_conditioned:
        return
    with torch.no_grad():
        first = dict(named)
        _run_layers(backbone.layers, first)
        named[conditioning.writes] = conditioning.estimate(*(first[n] for n in conditioning.reads))
    # Autocast caches low-precision copies of weights, also those made without gradient: the second
    # sweep would train nothing.
    torch.clear_autocast_cache()

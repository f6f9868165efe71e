"""A Profile for a device one does not have: from FLOPs, bytes and the device's data sheet.

In:     a model and a Cluster. Out: its Profile, marked as estimated.
A kernel takes as long as its arithmetic or its memory traffic, whichever is longer; a layer at
least as long as the host takes to launch its kernels. What a data sheet does not say (how
efficient kernels are) is an assumption of the cluster file; `calibrate_estimate` replaces it by the
ratio of measured to estimated times of a device one does have.
Source: Williams et al., "Roofline: An Insightful Visual Performance Model", CACM 2009.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dpipe.core.cluster import Cluster, Device
from lightning_dpipe.core.errors import ProfileError
from lightning_dpipe.core.fleet import fleet
from lightning_dpipe.core.graph import ComponentKind, ModelGraph
from lightning_dpipe.core.profile import ComponentCost, LayerCost, Profile
from lightning_dpipe.models.binding import bind
from lightning_dpipe.models.liveness import trace
from lightning_dpipe.models.spec import PipelineSpec
from lightning_dpipe.profiling.calibrate import scaled
from lightning_dpipe.profiling.kernels import Kernel, LayerWork, Work, count_work
from lightning_dpipe.profiling.store import tool_versions
from lightning_dpipe.runtime.bound import Binding

SAMPLES = (1, 2, 4, 8, 16, 32, 64)
"""Local batch sizes unless told otherwise."""

_OPTIMIZER_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes all but one back
_LAUNCHES_PER_FILL = 4
"""Starting a piece of frozen work is taken to hold up the host for as long as so many kernels."""

_AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedModel:
    """A model whose kernels were counted: estimates for any cluster follow at once."""

    graph: ModelGraph
    binding: Binding
    work: Work
    dtype: str


def count_model(spec: PipelineSpec, *, dtype: str = "bfloat16") -> CountedModel:
    """Trace a model and count its kernels; seconds for a full-size one.

    Args:
        spec: The model; weights may be on meta, and nothing is computed.
        dtype: ``float32``, or the dtype of mixed precision: ``bfloat16``, ``float16``.

    Raises:
        ProfileError: The dtype is not one of these.
        SpecError, UnsupportedError: As `trace`.
    """
    if dtype not in _AUTOCAST:
        raise ProfileError(f"dtype is {dtype!r}; expected one of {', '.join(_AUTOCAST)}")
    graph = trace(spec, autocast=_AUTOCAST[dtype])
    binding = bind(spec, graph)
    work = count_work(binding, graph, autocast=_AUTOCAST[dtype])
    return CountedModel(graph=graph, binding=binding, work=work, dtype=dtype)


def roofline_profile(
    model: CountedModel,
    *,
    cluster: Cluster,
    samples: Mapping[str, Sequence[int]] | Sequence[int] = SAMPLES,
) -> Profile:
    """Estimate the costs of a model on a cluster's devices.

    Links are those inside a node for messages, and one ring over all nodes for gradients. A cluster
    of several kinds of devices gives a profile of as many.

    Args:
        model: What `count_model` counted.
        cluster: Devices and links.
        samples: Local batch sizes, for all components or by name.

    Raises:
        ProfileError: A component has no sizes, or launches other kernels for other sizes.
        ClusterError: The device's peak for a dtype that the model computes in is not known.
    """
    profiles = [
        Profile(
            graph=model.graph,
            costs=_costs(model, device, samples),
            p2p=cluster.inside,
            allreduce=cluster.ring(cluster.nodes),
            device=device.name,
            dtype=model.dtype,
            fill_us=_LAUNCHES_PER_FILL * device.launch_us if model.graph.frozen else 0,
            memory_bytes=device.memory_bytes,
            estimated=True,
            versions=tool_versions(),
        )
        for device in (cluster.device, *cluster.others)
    ]
    return fleet(profiles, cluster.kinds or (0,) * cluster.world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Measured over estimated time of a component's forward and backward."""

    forward: float
    backward: float


def corrections(measured: Profile, estimated: Profile) -> dict[str, Correction]:
    """How far an estimate of the device that was measured is off, by component.

    Args:
        measured: What `profile_model` measured.
        estimated: The roofline profile of the same model on the same device.

    Raises:
        ProfileError: The profiles share no component or no batch size of one.
    """
    theirs = {cost.name: cost for cost in estimated.costs}
    found = {}
    for cost in measured.costs:
        if cost.name in theirs:
            found[cost.name] = _correction(cost, theirs[cost.name])
    if not found:
        raise ProfileError(
            f"the measured profile has {', '.join(c.name for c in measured.costs)}, the estimate "
            f"{', '.join(theirs)}; they share no component to compare"
        )
    return found


def calibrate_estimate(estimate: Profile, factors: Mapping[str, Correction]) -> Profile:
    """Scale an estimate by what the same estimate was off elsewhere; it stays an estimate.

    Components without a factor get the mean of the others (by logarithm).
    """
    default = Correction(
        forward=_mean(f.forward for f in factors.values()),
        backward=_mean(f.backward for f in factors.values()),
    )
    costs = []
    for cost in estimate.costs:
        factor = factors.get(cost.name, default)
        costs.append(scaled(cost, 0, len(cost.layers), factor.forward, factor.backward))
    return replace(estimate, costs=tuple(costs))


def layer_us(kernels: Iterable[Kernel], device: Device) -> int:
    """Time of kernels that run one after the other, rounded up to whole microseconds."""
    kernels = tuple(kernels)
    busy_us = sum(
        max(device.matrix_us(k.flops, k.dtype), device.memory_us(k.num_bytes)) for k in kernels
    )
    return math.ceil(max(busy_us, len(kernels) * device.launch_us))


def _costs(
    model: CountedModel,
    device: Device,
    samples: Mapping[str, Sequence[int]] | Sequence[int],
) -> tuple[ComponentCost, ...]:
    costs = []
    for component in model.graph.components:
        given = samples.get(component.name, ()) if isinstance(samples, Mapping) else samples
        sizes = tuple(sorted(set(given)))
        if not sizes or sizes[0] < 1:
            raise ProfileError(
                f"component {component.name!r} has sizes {list(sizes)}; "
                "give at least one batch size >= 1"
            )
        trains = component.kind is ComponentKind.BACKBONE
        by_layer = zip(*(model.work.at(component.name, n) for n in sizes), strict=True)
        bound = model.binding.layers[component.name]
        layers = tuple(
            _layer_cost(by_size, layer.parameters, trains, device)
            for by_size, layer in zip(by_layer, bound, strict=True)
        )
        costs.append(ComponentCost(name=component.name, samples=sizes, layers=layers))
    return tuple(costs)


def _layer_cost(
    by_size: Sequence[LayerWork], weights: Sequence[Tensor], trains: bool, device: Device
) -> LayerCost:
    trained_bytes = sum(p.nbytes for p in weights if trains and p.requires_grad)
    backward = tuple(layer_us(work.backward, device) for work in by_size)
    input_grad = tuple(layer_us(work.input_grad, device) for work in by_size)
    return LayerCost(
        name=by_size[0].name,
        forward_us=tuple(layer_us(work.forward, device) for work in by_size),
        backward_us=backward,
        input_grad_us=tuple(map(min, input_grad, backward)),
        activation_bytes=tuple(work.activation_bytes for work in by_size),
        param_bytes=sum(p.nbytes for p in weights),
        trained_bytes=trained_bytes,
        optimizer_us=math.ceil(device.memory_us(_OPTIMIZER_PASSES * trained_bytes)),
    )


def _correction(measured: ComponentCost, estimated: ComponentCost) -> Correction:
    common = sorted(set(measured.samples) & set(estimated.samples))
    if not common or len(measured.layers) != len(estimated.layers):
        raise ProfileError(
            f"component {measured.name!r} was measured at {list(measured.samples)} samples with "
            f"{len(measured.layers)} layers and estimated at {list(estimated.samples)} with "
            f"{len(estimated.layers)}; estimate the same model at the measured sizes"
        )

    def total_us(cost: ComponentCost, kind: str) -> int:
        at = [cost.samples.index(n) for n in common]
        return sum(getattr(layer, kind)[i] for layer in cost.layers for i in at)

    def ratio(kind: str) -> float:
        below = total_us(estimated, kind)
        return total_us(measured, kind) / below if below else 1.0

    return Correction(forward=ratio("forward_us"), backward=ratio("backward_us"))


def _mean(factors: Iterable[float]) -> float:
    logs = [math.log(f) for f in factors if f > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0

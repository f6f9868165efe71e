"""The guard of every adapter: the layer list against the library's own forward, bit for bit.

A library may change what a block's forward does between versions. So adapters run a tiny model of
the same class and flags once per process, both ways, and compare outputs and all gradients with
`torch.equal` before the real model is cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dpipe.core.errors import SpecError
from lightning_dpipe.models.spec import Layer

SEED = 20  # any: it only has to be the same for both runs


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model, its layer list, and a call of its own forward on the same `inputs`."""

    model: nn.Module
    layers: tuple[Layer, ...]
    inputs: Mapping[str, Tensor]
    output: str
    forward: Callable[[], Tensor]


_passed: set[str] = set()


def verify_once(key: str, make: Callable[[], Trial]) -> None:
    """Run a trial unless one with this `key` (class and configuration) passed in this process.

    Building and running it uses the CPU and leaves the global random state as it was.

    Raises:
        SpecError: The layer list differs from the library; the message names the first tensor.
    """
    if key in _passed:
        return
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        compare(make())
    _passed.add(key)


def arguments(model: Any) -> dict[str, Any]:
    """Constructor arguments of a diffusers model.

    (``from_config`` would put those back to their defaults that the model was made with.)
    """
    return {name: value for name, value in model.config.items() if not name.startswith("_")}


def config_key(model: Any) -> str:
    """Class and configuration of a diffusers model, but for its image size."""
    given = {k: v for k, v in sorted(arguments(model).items()) if k != "sample_size"}
    return f"{type(model).__qualname__} {given}"


def compare(trial: Trial) -> None:
    """Compare a layer list with the model's own forward: output, then each weight's gradient.

    Raises:
        SpecError: They differ; the message names the first tensor that does.
    """
    expected, expected_grads = _run(trial, trial.forward)
    found, found_grads = _run(trial, lambda: run_layers(trial.layers, trial.inputs)[trial.output])
    _same(trial, trial.output, expected, found)
    for name in expected_grads:
        _same(trial, f"the gradient of {name}", expected_grads[name], found_grads[name])


def run_layers(layers: tuple[Layer, ...], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a layer list by names; returns every name's last tensor."""
    tensors = dict(inputs)
    for layer in layers:
        made = layer.module(*[tensors[name] for name in layer.reads])
        made = (made,) if isinstance(made, Tensor) else made
        tensors.update(zip(layer.writes, made, strict=True))
    return tensors


def _run(trial: Trial, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    trial.model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    output = forward()
    if output.requires_grad:
        torch.autograd.backward(output, torch.randn_like(output))
    grads = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in trial.model.named_parameters()
    }
    return output.detach(), grads


def _same(trial: Trial, name: str, expected: Tensor | None, found: Tensor | None) -> None:
    if expected is None and found is None:
        return
    if expected is None or found is None:
        what = f"{name} exists only in {'the layer list' if expected is None else 'the library'}"
    elif expected.shape != found.shape:
        what = f"{name} is {list(found.shape)} instead of {list(expected.shape)}"
    elif torch.equal(expected, found):
        return
    else:
        off = float((expected - found).abs().max())
        what = f"{name} is off by up to {off:.3g}"
    raise SpecError(
        f"the layer list of {type(trial.model).__name__} differs from the library's own forward: "
        f"{what}; use a version of the library from constraints.txt, or report this"
    )

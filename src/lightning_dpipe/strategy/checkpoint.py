"""One checkpoint file with the layout of a single process, written and read by any number of ranks.

In:     a cut module (absent weights on meta, names and numbering those of the uncut one).
Out:    on rank 0 the complete model and optimizer state, in the single process's order; other ranks
        get nothing. Reading takes each rank's own part out of the complete file.

Rank 0 receives what it lacks tensor by tensor into host memory, from the lowest rank that has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.strategy.collectives import HostLink, move_to_root


def gather_model_state(module: nn.Module, link: HostLink) -> dict[str, Any]:
    """The whole model's ``state_dict`` on rank 0, ``{}`` elsewhere. Collective."""
    state = module.state_dict()
    held = {name for name, value in state.items() if not _is_absent(value)}
    owners = _owners(list(state), link.gather_objects(held))
    lost = [name for name in state if name not in owners]
    if lost:
        raise DPipeError(
            f"no rank holds {lost[0]!r} ({len(lost)} weights in all): the plan is broken"
        )
    arrived = move_to_root(link, state, owners)
    if link.rank != 0:
        return {}
    state.update(arrived)
    return state


def load_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load this rank's part of a complete ``state_dict``.

    Raises:
        RuntimeError: `strict`, and the file lacks weights of the model or has others.
    """
    absent = {name for name, value in module.state_dict().items() if _is_absent(value)}
    own = {name: value for name, value in state.items() if name not in absent}
    result = module.load_state_dict(own, strict=False)
    missing = [n for n in result.missing_keys if n not in absent]
    missing += [n for n in absent if n not in state]
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    if result.unexpected_keys:
        problems.append(f"unexpected: {', '.join(result.unexpected_keys)}")
    if strict and problems:
        raise RuntimeError(
            f"the checkpoint does not fit {type(module).__name__}; {'; '.join(problems)}"
        )


def gather_optimizer_state(optimizer: Optimizer, link: HostLink) -> dict[str, Any]:
    """The whole model's optimizer state on rank 0, ``{}`` elsewhere. Collective.

    Parameters are numbered as in the uncut model, because absent ones keep their place.
    """
    state = optimizer.state_dict()
    absent = {i for i, p in enumerate(parameters_of(optimizer)) if p.is_meta}
    mine = {i: entry for i, entry in state["state"].items() if i not in absent}
    flat: dict[str, Tensor] = {}
    plain: dict[int, dict[str, Any]] = {}
    for index, entry in mine.items():
        plain[index] = {}
        for key, value in entry.items():
            plain[index][key] = None if isinstance(value, Tensor) else value
            if isinstance(value, Tensor):
                flat[f"{index}/{key}"] = value
    everyone = link.gather_objects((list(flat), plain))
    names = list(dict.fromkeys(name for tensors, _ in everyone for name in tensors))
    owners = _owners(names, [set(tensors) for tensors, _ in everyone])
    arrived = move_to_root(link, flat, owners)
    if link.rank != 0:
        return {}
    merged: dict[int, dict[str, Any]] = {}
    for _, part in everyone:
        for index, entry in part.items():
            if index not in merged:
                merged[index] = dict(entry)
    for name in names:
        index, key = name.split("/", 1)
        merged[int(index)][key] = arrived[name] if owners[name] else flat[name]
    state["state"] = {index: merged[index] for index in sorted(merged)}
    return state


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of a complete optimizer state."""
    present = {i for i, p in enumerate(parameters_of(optimizer)) if not p.is_meta}
    own = {index: entry for index, entry in state["state"].items() if index in present}
    optimizer.load_state_dict({**state, "state": own})


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters in the optimizer's numbering."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def broadcast_weights(module: nn.Module, link: HostLink) -> None:
    """Give every rank rank 0's weights and buffers, as DDP does: a script may set no seed."""
    if link.world_size == 1:
        return
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel() and not tensor.is_meta:
                torch.distributed.broadcast(tensor.data, 0)


def _owners(names: Sequence[str], held: Sequence[set[str]]) -> dict[str, int]:
    """The lowest rank that holds each name, in the given order."""
    owners: dict[str, int] = {}
    for name in names:
        rank = next((rank for rank, names_held in enumerate(held) if name in names_held), None)
        if rank is not None:
            owners[name] = rank
    return owners


def _is_absent(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta

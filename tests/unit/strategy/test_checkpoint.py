"""Taking one rank's part out of a complete file. (Merging is tested with real ranks in dist/.)"""

import copy

import pytest
import torch
from torch import nn

from lightning_dpipe.strategy.checkpoint import (
    gather_model_state,
    gather_optimizer_state,
    load_model_state,
    load_optimizer_state,
)
from lightning_dpipe.strategy.collectives import HostLink


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))


def drop(module: nn.Sequential, index: int) -> None:
    """Make one layer absent."""
    for name, p in module[index].named_parameters():
        setattr(module[index], name, nn.Parameter(torch.empty_like(p, device="meta")))


def trained(module: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    return optimizer


def test_a_cut_module_takes_its_own_weights_and_no_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    whole, part = model(), model()
    drop(part, 1)
    load_model_state(part, whole.state_dict(), strict=True)
    assert torch.equal(part[0].weight, whole[0].weight)
    assert part[1].weight.is_meta
    assert not recwarn.list


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "2.running_mean"])
def test_a_file_that_lacks_a_weight_is_refused_also_where_it_is_absent(name: str) -> None:
    part = model()
    drop(part, 1)
    state = model().state_dict()
    del state[name]
    with pytest.raises(RuntimeError, match=f"missing: {name}"):
        load_model_state(part, state, strict=True)
    load_model_state(part, state, strict=False)


def test_a_file_with_a_foreign_weight_is_refused() -> None:
    with pytest.raises(RuntimeError, match="unexpected: other"):
        load_model_state(model(), model().state_dict() | {"other": torch.ones(1)}, strict=True)


def test_one_rank_gathers_what_torch_would_save() -> None:
    module = model()
    optimizer = trained(module)
    link = HostLink()
    state = gather_model_state(module, link)
    assert list(state) == list(module.state_dict())
    merged, plain = gather_optimizer_state(optimizer, link), optimizer.state_dict()
    assert merged["param_groups"] == plain["param_groups"]
    assert list(merged["state"]) == list(plain["state"])
    for index, entry in plain["state"].items():
        assert list(merged["state"][index]) == list(entry)
        assert all(torch.equal(merged["state"][index][k], v) for k, v in entry.items())


def test_a_cut_optimizer_takes_its_own_state() -> None:
    whole = model()
    state = copy.deepcopy(trained(whole).state_dict())
    part = model()
    drop(part, 1)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.5)
    load_optimizer_state(optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert sorted(optimizer.state_dict()["state"]) == [0, 1, 4, 5]
    assert torch.equal(optimizer.state[part[0].weight]["exp_avg"], state["state"][0]["exp_avg"])

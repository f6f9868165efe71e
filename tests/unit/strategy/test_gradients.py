"""Set-aside gradients against plain accumulation, with Lightning's order of calls."""

import torch
from torch import nn

from lightning_dpipe.strategy.gradients import GradientStash


def test_a_window_of_three_equals_plain_accumulation_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(6, 4, generator=generator)

    def backward(module: nn.Module, batch: torch.Tensor) -> None:
        for part in batch.chunk(2):  # two micro-batches
            (module(part[None]).square().sum() / 3).backward()

    plain, staged = nn.Linear(2, 3), nn.Linear(2, 3)
    staged.load_state_dict(plain.state_dict())
    stash = GradientStash(list(staged.parameters()))
    for index, batch in enumerate(batches):
        if index % 3 == 0:
            plain.zero_grad()
        backward(plain, batch)

        first = index % 3 == 0
        stash.before(first=first)
        backward(staged, batch)
        stash.after(first=first)
        if first:
            staged.zero_grad()
        stash.deposit()
        for a, b in zip(plain.parameters(), staged.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)


def test_a_parameter_without_gradient_stays_without() -> None:
    module = nn.Linear(2, 2)
    stash = GradientStash(list(module.parameters()))
    stash.before(first=True)
    module.weight.sum().backward()
    stash.after(first=True)
    assert module.weight.grad is None
    stash.deposit()
    assert module.weight.grad is not None
    assert module.bias.grad is None

"""Compares a run over threads with one process: losses and the gradient of every weight."""

import copy
from collections.abc import Callable

import pytest
import torch

from lightning_dpipe.core.plan import Fill, Plan
from lightning_dpipe.models.spec import PipelineSpec
from oracle import accumulate, encode, fills_of, joint
from pipeline import gather_gradients, run_pipeline
from small import small_batch

Make = Callable[[], PipelineSpec]


def reference(make: Make, plan: Plan, batches, coins=None, filled=False, accumulation=1):
    """Losses and gradients of one process over the same micro-batches and encoder slices."""
    spec = copy.deepcopy(make())
    losses = []
    for step, batch in enumerate(batches):
        total = sum(len(x["image"]) for x in batch)
        loss = 0.0
        for ranks in plan.groups:
            encoded = []
            for device, rank in enumerate(ranks):
                ahead = filled and step > 0
                # The coin of the step that encodes decides which fills were used.
                coin = bool(coins and coins[step - 1]) if ahead else False
                slices = fills_of(plan, device, spec, self_conditioned=coin) if ahead else None
                rows = len(batch[rank]["image"])
                if slices is None:
                    slices = [
                        Fill(device=device, after=None, component=c.name, start=0,
                             stop=len(c.layers), first=0, last=rows)
                        for c in spec.frozen
                    ]  # fmt: skip
                encoded.append((rank, encode(spec, batch[rank], slices)))
            named = joint([x for _, x in sorted(encoded, key=lambda pair: pair[0])])
            loss += accumulate(
                spec,
                named,
                min(plan.num_microbatches, len(named["image"])),
                1.0 / (total * accumulation),
                self_conditioned=bool(coins and coins[step]),
            )
        losses.append(loss)
    gradients = {
        f"{backbone.name}.{layer.name}.{i}": p.grad
        for backbone in spec.backbones
        for layer in backbone.layers
        for i, p in enumerate(layer.parameters())
        if p.requires_grad
    }
    return losses, gradients


def compare(make: Make, plan: Plan, batches, *, exact: bool, **kwargs) -> None:
    """Run over threads and compare with one process."""
    outcomes = run_pipeline(make, plan, batches, **kwargs)
    sums = [sum(x) for x in zip(*(o.loss_sums for o in outcomes), strict=True)]
    same(make, plan, batches, sums, gather_gradients(plan, outcomes), exact=exact, **kwargs)


def same(
    make: Make, plan: Plan, batches, sums, found, *, exact: bool, coins=None, filled=False,
    accumulate=1,
) -> None:  # fmt: skip
    """Compare losses of each step and the gradients they left with one process's."""
    losses, wanted = reference(make, plan, batches, coins, filled, accumulate)
    assert sums == pytest.approx(losses, rel=1e-6)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad is not None, name
        assert found[name] is not None, name
        if exact:
            assert torch.equal(found[name], grad), name
        else:
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def all_rows(world: int, rows: int, steps: int):
    return [
        [small_batch(rows, seed=100 * step + rank) for rank in range(world)]
        for step in range(steps)
    ]

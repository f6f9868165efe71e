"""``dpipe verify``: does this model train the same on a pipeline as in one process?

In: a composed config, of a recipe or of the user's own module (``model._target_=...``).
Out: a table of differences and PASS or FAIL (exit code 1) for one step: loss and every gradient,
under the plan, its frozen work done in the bubbles of the step before, against one process that
accumulates the same micro-batches. With ``--json`` the last line is one JSON object.

The plan's ranks are threads of this process. Dropout is off on both sides.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from omegaconf import DictConfig
from torch import Tensor

from lightning_dpipe.cli.app import JobFailedError
from lightning_dpipe.cli.one_process import accumulate_step
from lightning_dpipe.cli.planned import Planned, plan_config
from lightning_dpipe.cli.threaded import Outcome, is_replicated, run_threads
from lightning_dpipe.core.errors import DPipeError
from lightning_dpipe.models.spec import DRAW_KEY
from lightning_dpipe.strategy.local import select_fields

NUM_SHOWN = 10
REPLICA_LIMIT = 1e-6
"""Largest relative difference with several replicas or on a GPU; otherwise none is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor, or the loss: ``||a - b|| / ||b||``; infinite where only one side has it."""

    name: str
    relative: float
    largest: float
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pipeline against one process, for one variant of the step."""

    variant: str
    loss: Difference
    gradients: tuple[Difference, ...]
    limit: float

    @property
    def passed(self) -> bool:
        """Whether every difference is within the limit."""
        return all(d.relative <= self.limit for d in (self.loss, *self.gradients))


def run(config: DictConfig, flags: Sequence[str] = ()) -> None:
    """Compare and print.

    Raises:
        JobFailedError: A difference is beyond the limit.
    """
    planned = plan_config(config)
    comparisons = compare(planned)
    plan = planned.built.plan
    print(
        f"{plan.stage_counts} stages x {len(plan.groups)} replicas, {plan.schedule}, "
        f"{plan.num_microbatches} micro-batches, {len(plan.fills)} fills, "
        f"global batch {plan.batch_size * plan.world_size}"
    )
    for comparison in comparisons:
        print(f"\n{table(comparison)}")
    passed = all(c.passed for c in comparisons)
    if "--json" in flags:
        print(json.dumps({"passed": passed, "variants": [_data(c) for c in comparisons]}))
    if not passed:
        raise JobFailedError


def compare(planned: Planned) -> tuple[Comparison, ...]:
    """Run the step both ways: plain and, if the model has it, self-conditioned."""
    module, built = planned.module, planned.built
    module.eval()  # dropout off; what is trained still gets its gradient
    batches = _batches(planned, num_steps=2)
    exact = not is_replicated(built.plan) and planned.device.type == "cpu"
    variants = {"plain": False}
    if built.graph.feedback is not None:
        variants["self-conditioned"] = True
    found = []
    for variant, coin in variants.items():
        module.zero_grad()
        piped = run_threads(module, built, batches, device=planned.device, self_conditioned=coin)
        module.zero_grad()
        loss = accumulate_step(
            built.binding, built.graph, built.plan, batches[-1], self_conditioned=coin
        )
        gradients = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
        alone = Outcome(loss=loss, gradients=gradients)
        found.append(_compare(variant, piped, alone, 0.0 if exact else REPLICA_LIMIT))
    return tuple(found)


def _batches(planned: Planned, num_steps: int) -> list[list[dict[str, Tensor]]]:
    """``[step][rank]``: full local batches of the training set, with the keys training uses."""
    plan, spec = planned.built.plan, planned.module.spec
    needed = num_steps * plan.world_size
    full: list[dict[str, Tensor]] = []
    for batch in itertools.chain.from_iterable(itertools.repeat(planned.loader, needed)):
        fields = select_fields(spec, batch)
        if len(next(iter(fields.values()))) == plan.batch_size:
            full.append({k: v.to(planned.device) for k, v in fields.items()})
        if len(full) == needed:
            break
    else:
        raise DPipeError(
            f"the training set has no batch of {plan.batch_size} samples; use a smaller batch size"
        )
    slots = torch.arange(plan.batch_size) * plan.world_size
    for index, fields in enumerate(full):
        step, rank = divmod(index, plan.world_size)
        fields[DRAW_KEY] = torch.stack([torch.full_like(slots, step), slots + rank], dim=1)
    return [full[i : i + plan.world_size] for i in range(0, needed, plan.world_size)]


def _compare(variant: str, piped: Outcome, alone: Outcome, limit: float) -> Comparison:
    names = piped.gradients.keys() | alone.gradients.keys()
    differences = [_difference(n, piped.gradients.get(n), alone.gradients.get(n)) for n in names]
    apart = abs(piped.loss - alone.loss)
    return Comparison(
        variant=variant,
        loss=Difference(
            name="loss",
            relative=apart / abs(alone.loss) if apart else 0.0,
            largest=apart,
            identical=apart == 0.0,
        ),
        gradients=tuple(sorted(differences, key=lambda d: (-d.relative, d.name))),
        limit=limit,
    )


def _difference(name: str, a: Tensor | None, b: Tensor | None) -> Difference:
    if a is None or b is None:
        same = a is None and b is None
        far = 0.0 if same else math.inf
        return Difference(name=name, relative=far, largest=far, identical=same)
    apart = (a.double() - b.double()).abs()
    identical = torch.equal(a, b)
    norm = float(b.double().norm())
    relative = 0.0 if identical else float(apart.norm()) / norm if norm else math.inf
    if math.isnan(relative):
        relative = math.inf  # NaN on one side must not pass for small
    return Difference(name=name, relative=relative, largest=float(apart.max()), identical=identical)


def table(comparison: Comparison) -> str:
    """The comparison as text: totals, then the gradients that differ most."""
    gradients = comparison.gradients
    differing = [d for d in gradients if not d.identical]
    worst = max((d.relative for d in gradients), default=0.0)
    lines = [
        f"{comparison.variant:<42}relative    largest",
        f"{'loss':<40}{comparison.loss.relative:>10.2e}{comparison.loss.largest:>11.2e}",
        f"{f'gradients ({len(gradients)} tensors), worst':<40}{worst:>10.2e}"
        f"{max((d.largest for d in gradients), default=0.0):>11.2e}",
        f"{'gradients that are not bit-identical':<40}{len(differing):>10}",
    ]
    lines += [
        f"  {d.name[-37:]:<38}{d.relative:>10.2e}{d.largest:>11.2e}" for d in differing[:NUM_SHOWN]
    ]
    if len(differing) > NUM_SHOWN:
        lines.append(f"  ... and {len(differing) - NUM_SHOWN} more")
    verdict = "PASS" if comparison.passed else "FAIL"
    allowed = f"{comparison.limit:.0e} allowed" if comparison.limit else "no difference allowed"
    return "\n".join([*lines, f"{verdict} ({allowed})"])


def _data(comparison: Comparison) -> Mapping[str, object]:
    return {
        "variant": comparison.variant,
        "passed": comparison.passed,
        "limit": comparison.limit,
        "loss": asdict(comparison.loss),
        "num_gradients": len(comparison.gradients),
        "num_differing": sum(not d.identical for d in comparison.gradients),
        "worst": asdict(comparison.gradients[0]) if comparison.gradients else None,
    }
